"""Joins users' feedback with the recorded requests it is about, into live training samples.

`signals.py` makes a reward of declared signals, `sessions.py` samples of a session, `join.py` is
the join itself; `bursts.py` holds what comes in floods, `trust.py` weighs users, `preferences.py`
makes pairs and labels; all are pure. `actor.py` wires them to the log. A signal is declared in the
configuration (`[[feedback.signals]]`, `messages/signals`).
"""
