"""The composition root: command line, configuration, bus adapters, run files."""
