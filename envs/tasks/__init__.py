"""Tasks at run time: workspaces, gates, storage, and Harbor's folder format.

`source.py` says what every task source yields, `gates.py` holds the only gates, `workspace.py` is
what an episode finds in its machine and what it left there, `set_ups.py` what of that the task's
own set-up made, `storage.py` keeps a run's tasks apart from their hidden tests, and
`harbor/` reads and writes folders. Tasks are made offline, in `envs/factory`. To add something that
every episode finds, extend `workspace.open_workspace`.
"""
