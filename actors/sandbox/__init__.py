"""Sandbox hosts: machines on lease.

`leases.py` is the book of leases over a pool of machines, `actor.py` answers requests with it.
"""
