"""Tasks at run time: workspaces, test reports, gates, and Harbor's folder format.

`source.py` is what every task source yields, `gates.py` holds the only gates; making tasks
offline is `envs/factory`.
"""
