"""The commands: thin over the Python entry points."""
