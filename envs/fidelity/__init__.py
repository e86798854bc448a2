"""Differences between machines: a probe that runs in the guest, and its comparison.

The aim is that training machines equal the production machine, not that they hide what they are.
`probe.py` is the guest's program, `compare.py` sets two results against each other and against the
reviewed allow-list, and lists what a model could notice in one. To add a check: one line in
`probe.py`'s table; if it differs for a reason, one entry with that reason in `allowed.toml`.
"""
