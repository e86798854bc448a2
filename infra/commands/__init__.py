"""Commands that inspect a run or a machine; one module each.

To add a command: a module with a function of the parsed arguments, and its line in `infra/cli.py`.
"""
