"""The protocols that the gateway speaks: each route a translation to `LiveRequest` and back.

To add one: `<name>.py` with a function that reads a body into an `Asked` and a `ReplyWriter` that
says the reply, and its line in `gateway/app.py`.
"""
