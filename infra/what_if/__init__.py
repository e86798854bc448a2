"""`penstock replay RUN --what-if KEY=VALUE`: trains a run's log with other settings or rewards.

`settings.py` reads the changes; `command.py` trains, evaluates the weights on the run's held-out
tasks, and writes the curves of both.
"""
