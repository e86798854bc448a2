"""`penstock bench`: speed as ratios in one run; each module measures one thing.

To add one: a module with a function that returns its figures, and its line in `command.BENCHES`.
"""
