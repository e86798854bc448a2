"""Sandbox hosts lease the machines of a pool over the bus.

The pool (`envs/microvm/pool/`) boots, leases and reaps machines; `actor.py` serves requests with
it. Clients use `envs/sandbox_client`, which implements the `Sandbox` protocol. To add an operation,
add a message to `messages`, its handler to `actor.py`, and a method to
`envs/sandbox_client/client.py`.
"""
