"""`penstock bench`: speed as ratios in one run, and what training gains (`learning/`).

To add one: a module `<name>.py` with a function `bench_<name>`, and its name in `command.py`.
"""
