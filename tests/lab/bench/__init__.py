"""Speed as ratios within one run, and what training gains (`learning/`).

To add a bench: see `tests/lab/__init__.py`; its module goes here.
"""
