"""Typed messages between actors, their subjects and codec, the `Bus` protocol, and the errors.

The docstring of a message begins with its route: `Sender -> receivers`.

To add a message: one `Event` struct in `messages/<topic>.py` that names its stream and its
key, one line in `codec.py`, and a golden file (`python -m tests.golden.write`).
"""
