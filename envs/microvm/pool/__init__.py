"""Pre-warmed machines, leased for a time.

`pool.py` grants leases (`lease.py`); an `image_pool.py` per image holds idle machines and pending
leases, `image_pools.py` opens and evicts them; `reconciler.py` boots and ends machines within one
bound, and pins them to processors. To add a bound: a parameter of `Pool`, enforced in the
reconciler, and a counter in `lease.py`.
"""
