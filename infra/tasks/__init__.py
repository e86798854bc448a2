"""Where a run's tasks come from, and `penstock tasks`, which makes, checks and shows them.

`settings.py` is the `[prepare]` section, `sources.py` draws the tasks of its sources.
`command.py` declares the arguments, `actions.py` runs them and writes the browsable page.
To add an action: its parser in `command.py` and its branch in `actions.run`.
"""
