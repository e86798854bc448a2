"""A replica's side: `weight_replica.py` moves one copy forward, `receiver.py` drives its engine.

To serve another engine: a class with the methods of `receiver.UpdatableEngine`.
"""
