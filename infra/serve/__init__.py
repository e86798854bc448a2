"""`penstock serve`: a run's policy, or a model's folder, as a service without end.

`settings.py` makes a service's configuration of a run's, `command.py` runs it.
"""
