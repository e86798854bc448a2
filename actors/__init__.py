"""The actors: each folder is one role; all share `runtime` and `policy`, and nothing else.

To add one: a folder whose module `actor` holds a class with a `role` and `on_<event>` methods (see
`runtime/__init__.py`) and whose module `config` holds its settings, and its line in `ROLES`
(`infra/run/roles.py`). The folder joins the independence contract in `pyproject.toml`.
"""
