"""Pool of pre-warmed machines, leased for a limited time.

`pool.py` grants leases (`lease.py`). An `ImagePool` holds the idle machines and pending leases of
one image; `image_pools.py` opens and evicts image pools. `reconciler.py` boots and ends machines
within the limit and pins them to CPUs. To add a limit, add a parameter to `Pool`, enforce it in the
reconciler, and add a counter to `lease.py`.
"""
