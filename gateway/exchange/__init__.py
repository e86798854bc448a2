"""Turns a `LiveRequest` into its reply and record, the same way for every route.

`serve.py` admits a request, `plan.py` makes its context and sampling parameters, and `exchange.py`
samples, replies and records.
"""
