"""A region's side: fetch every object once, merge deltas, keep what late joiners need.

`retention.py` decides (pure), `consolidation.py` carries it out, `relay.py` is the actor of a
region and `compactor.py` the one of an origin store that does not keep everything.
"""
