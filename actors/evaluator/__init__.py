"""Evaluations of policy versions on held-out tasks.

`schedule.py` decides which version is due, `evaluation.py` counts verdicts; both are pure.
`actor.py` wires them to the log. To evaluate on another occasion, add a method to `EvalSchedule`
that makes a version due, and its call in `actor.py`.
"""
