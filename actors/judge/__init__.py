"""Judges: what a finished rollout is worth.

To add a judge: one file with a class that has `name`, `version` and `judge`, and one line
in `registry.JUDGES`. `compose.py` turns what it found into a reward, `actor.py` publishes that.
"""
