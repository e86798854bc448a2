"""Tasks at run time: workspaces, gates, storage, and Harbor's folder format.

`source.py` defines candidates, `gates.py` the gates that every task passes, `workspace.py` the
files of an episode at its start and its end, `set_ups.py` the files that a task's set-up creates,
`storage.py` keeps tasks apart from their hidden tests, and `harbor/` reads and writes folders.
Tasks are made offline, in `envs/factory`. To add something that every episode finds, extend
`workspace.open_workspace`.
"""
