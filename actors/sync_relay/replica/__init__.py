"""A replica's side: `weight_replica.py` moves one copy forward, `receiver.py` drives its engine."""
