"""The composition root: command line, configuration, NATS, stores, run files and tools.

`cli.py` names every command; `run/` starts and ends runs, `bus/` and `stores/` are the adapters of
`messages.bus`, the other folders hold one command or tool each. To add a command: its function in
a folder or in `commands/`, and its line in `cli.py`.
"""
