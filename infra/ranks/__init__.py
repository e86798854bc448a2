"""A run's ranks, the processes that share its weights.

`checks.py`: processes and settings fit; `environment.py`, `units.py`: how they start and end;
`build.py`: the trainer's engine and the actor of a rank; `arithmetic.py`: what replay has to match.
"""
