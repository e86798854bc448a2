"""`penstock bench`: speed as ratios in one run; each module measures one thing.

To add one: a module `<name>.py` with a function `bench_<name>`, and its name in `command.BENCHES`.
"""
