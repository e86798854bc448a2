"""Models from outside: their files into a run.

`settings.py` is the `[model]` table, `claim.py` checks a checkpoint's folder and copies its files
into the run's store, from where alone the run reads them.
"""
