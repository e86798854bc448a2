"""A replica's side of weight sync.

`weight_replica.py` moves one copy of the weights forward, and `receiver.py` updates the engine from
it. To serve another engine, write a class with the methods of `receiver.UpdatableEngine`.
"""
