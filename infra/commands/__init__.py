"""Commands that inspect a run or a machine, one module each.

To add a command, write a function of the parsed arguments and add it to `infra/cli.py`.
"""
