"""Evaluations of policy versions on held-out tasks.

`schedule.py` decides which version is due, `evaluation.py` counts verdicts; both are pure.
`actor.py` wires them to the log.
"""
