"""Joins users' feedback with the recorded requests it is about, into live training samples.

`sessions.py` turns sessions and their signals into samples, `join.py` is the join itself,
`bursts.py` holds back bursts, `trust.py` weighs users and `preferences.py` makes pairs and labels;
all are pure. `actor.py` wires them to the log. A signal is declared in the
configuration (`[[feedback.signals]]`, `messages/signals`).
"""
