"""Sandbox hosts: the machines of one pool, on lease over the bus.

The pool (`envs/microvm/pool.py`) boots, lends and reaps; `actor.py` answers requests with it. An
asker uses `envs/remote`, which speaks the `Sandbox` protocol. Where there are many hosts,
`scheduler.py` says which of them gets a group's machines; `fleet.py` is how it chooses.
"""
