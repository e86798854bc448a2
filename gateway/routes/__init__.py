"""The protocols of the gateway: each route translates a body to a `LiveRequest`, and replies back.

To add one, write `<name>.py` with a function that parses a body into an `Asked` and a `ReplyWriter`
that serializes the reply, and register it in `gateway/app.py`.
"""
