"""A region's side: fetch every object once, merge deltas, keep what late joiners need.

`relay.py` is the actor of a region, `compactor.py` that of an origin store that does not keep
everything. Both consolidate their store (`consolidation.py`): `retention.py` decides (pure),
`Merger` makes. To change what is kept: `retention.py` and its worked example.
"""
