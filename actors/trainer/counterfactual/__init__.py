"""Repeats the steps of a log with a difference.

`retraining.py` leaves out samples of users; `what_if.py` changes settings or rewards.
"""
