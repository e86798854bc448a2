"""A log's steps taken again with something different.

`retraining.py`: without some users' samples; `what_if.py`: with other settings or rewards.
"""
