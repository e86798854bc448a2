"""Joins users' feedback with the recorded requests it is about, into live training samples.

`signals.py` maps named signals to rewards, `join.py` is the join itself; both are pure. `actor.py`
wires them to the log. To add a signal: one entry in `signals.py`.
"""
