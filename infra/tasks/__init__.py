"""`penstock tasks`: makes, checks and shows tasks.

`command.py` declares the arguments, `actions.py` runs them and writes the page for browsing. To add
an action: its parser in `command.py` and its branch in `actions.run`.
"""
