"""The gatekeeper: evaluations of policy versions, and live samples joined from users' feedback.

`schedule.py` says which version is due, `evaluation.py` counts verdicts; both are pure.
"""
