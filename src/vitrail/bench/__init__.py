"""The benchmark: many images, methods and metrics, in a run that survives anything."""
