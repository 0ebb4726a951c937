"""The engine: the forward pass written once as operations, rules for the way back, and traces of both."""
