"""What a step optimizes: advantages, off-policy corrections, losses.

To add one: a function in `advantages.py` or `losses.py`, its line in the table
there, and its name in `actors/trainer/config.py`.
"""
