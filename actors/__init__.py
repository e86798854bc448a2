"""The actors, one folder per role. They share `runtime` and `policy` and import nothing else.

To add an actor, create a folder with two modules: `actor`, with a class that has a `role` and
`on_<event>` methods (see `runtime/__init__.py`), and `config`, with its settings. Then register it
in `ROLES` (`infra/run/roles.py`) and list the folder in the independence contract in
`pyproject.toml`.
"""
