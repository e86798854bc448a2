"""From a `LiveRequest` to its reply and record, the same for every route.

`serve.py` admits a request, `plan.py` makes its context and sampling, `exchange.py` samples,
replies and records.
"""
