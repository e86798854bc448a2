"""Finds differences between machines: a probe that runs in the guest, and a comparison of results.

The aim is that training machines match the production machine, not that they hide what they are.
`probe.py` is the program that runs in the guest. `compare.py` compares two results, explains
differences by the reviewed allow-list, and lists signs by which a model could recognize a training
machine. To add a check, add a line to the table in `probe.py`; if it may differ, add an entry with
the reason to `allowed.toml`.
"""
