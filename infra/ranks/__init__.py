"""Ranks: the processes that hold a run's weights together.

`environment.py` and `units.py` say how they start and end, `build.py` builds the trainer's engine
and the actor of a rank, `arithmetic.py` names what a replay has to match, `gang.py` runs a command
in several ranks.
"""
