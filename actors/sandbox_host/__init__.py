"""Sandbox hosts: the machines of one pool, leased over the bus.

The pool (`envs/microvm/pool/`) boots, leases and reaps machines; `actor.py` serves requests with
it. Clients use `envs/sandbox_client`, which implements the `Sandbox` protocol. To add an operation:
a message in `messages`, its handler in `actor.py`, a method in
`envs/sandbox_client/client.py`.
"""
