"""Evaluations of policy versions on held-out tasks.

`schedule.py` decides which version is due and on which tasks, `evaluation.py` counts verdicts,
`estimates.py` has pass@k; all are pure.
`actor.py` wires them to the log. To evaluate on another occasion, add a method to `EvalSchedule`
that makes a version due, and its call in `actor.py`.
"""
