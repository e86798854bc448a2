"""Joins users' feedback with the requests it refers to, into live training samples.

`actor.py` follows the log; everything else is pure. `sessions.py` turns declared signals into
rewards and requests into samples, `join.py` joins the two, `bursts.py` quarantines floods,
`trust.py` weighs users, and `preferences.py` creates preference pairs and labels. To add a signal,
declare it in the configuration (`[[feedback.signals]]`, `messages/signals`).
"""
