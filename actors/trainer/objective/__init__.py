"""What a step optimizes: advantages, off-policy corrections, losses, KL and entropy.

To add a loss: a line in `registry.py`, and a function in `losses.py`. To add another part: a
function in `advantages.py` or `corrections.py`, its line in the table there, and its name in
`actors/trainer/config.py`.
"""
