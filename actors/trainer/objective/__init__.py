"""What a step optimizes: advantages, off-policy corrections, losses, KL and entropy.

To add one: a function in `advantages.py`, `corrections.py` or `losses.py`, its line in the table
there, and its name in `actors/trainer/config.py`.
"""
