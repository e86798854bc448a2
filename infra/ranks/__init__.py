"""A run's ranks, the processes that share its weights: their settings checked, their start.

`checks.py`: processes and settings fit; `arithmetic.py`: what replay has to match.
"""
