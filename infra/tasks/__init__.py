"""`penstock tasks`: coding tasks from local repositories, made, checked and shown.

`command.py` declares the arguments, `actions.py` runs them and writes the browsable page.
To add an action: its parser in `command.py` and its branch in `actions.run`.
"""
