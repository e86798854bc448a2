"""`penstock run`: configuration, preparation, the launcher and its processes, and a run's end.

`command.py` is the command, `config.py` its configuration, `roles.py` builds each actor from it,
`launcher.py` supervises processes, `closing.py` does what comes last. To add a role: a builder in
`roles.py` and its name in `config.py`.
"""
