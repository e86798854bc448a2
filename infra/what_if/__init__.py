"""`penstock replay RUN --what-if KEY=VALUE`: trains a run's log with other settings or rewards.

`settings.py` reads what differs; `command.py` trains, evaluates the weights on the run's held-out
tasks, and writes both runs' curves side by side.
"""
