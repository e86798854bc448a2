"""Pre-warmed machines, leased for a time.

`pool.py` leases; an `image_pool.py` per image holds idle machines and who waits, `image_pools.py`
opens and closes them; `machines.py` boots and ends machines within one bound; `reconciler.py` does
what happens without a request; `restores.py` starts copies of saved machines; `cpus.py` assigns
processors.
"""
