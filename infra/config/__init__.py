"""A run's configuration: the typed tables, reading them from TOML, and checks across tables.

Imports no torch, so that a wrong key is refused at once. To add a table: the settings struct of the
component, and its field in `RunConfig` (`settings.py`).
"""
