"""Ranks: the trainer processes that share one copy of the weights.

`environment.py` and `units.py` define how ranks start and stop together; `build.py` builds the
trainer's engine and the actor of one rank; `arithmetic.py` records what a replay has to match.
`infra/config/ranks_checks.py` checks that processes and settings fit,
and `gang.py` runs a command in several ranks.
"""
