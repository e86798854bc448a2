"""Evaluations of policy versions on held-out tasks.

`schedule.py` has the settings and decides which version is due on which tasks; `evaluation.py`
counts verdicts and estimates pass@k. Both are pure; `actor.py` connects them to the log. To
evaluate on another occasion, handle its event in `actor.py` and return `_announced(...)`.
"""
