"""A region's side of weight sync: fetches every object once, merges deltas, and retains updates.

`relay.py` is the actor of a region, `compactor.py` that of an origin store that does not keep every
version. Both consolidate their store (`consolidation.py`): `retention.py` decides which updates to
make and to keep (pure), and `Merger` makes them. To change the retention, edit `retention.py` and
the worked example in its docstring.
"""
