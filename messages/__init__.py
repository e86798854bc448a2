"""Typed events, subjects, codec, the `Bus` protocol and the errors: all that actors say.

To add a message: one `Event` struct in `messages/<topic>.py` that names its stream and its
key, one line in `codec.py`, and a golden file (`python -m tests.golden.write`).
"""
