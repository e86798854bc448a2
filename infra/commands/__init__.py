"""Commands that look at a run or a machine; each module holds one.

To add a command: a module here and its parser in `infra/cli.py`.
"""
