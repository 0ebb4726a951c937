"""Views of models: any supported network through one interface."""
