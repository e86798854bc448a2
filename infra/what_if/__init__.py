"""`penstock replay RUN --what-if KEY=VALUE`: a run's log trained with something different.

`settings.py` reads what is different, `command.py` does it, `evaluation.py` evaluates the weights
on the run's held-out tasks, `report.py` writes the curves beside the run's own.
"""
