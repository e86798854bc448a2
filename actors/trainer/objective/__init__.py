"""What a step optimizes: advantages, off-policy corrections, losses, KL and entropy.

To add a loss, add a function to `losses.py` and a line to `registry.py`. To add an estimator or a
correction, add a function to `advantages.py` or `corrections.py`, a line to its table, and its name
to `actors/trainer/config.py`.
"""
