"""Snapshots of folds: state that an actor built from the log, with the positions it covers.

`state_tree.py` turns state into plain values and back, `stored.py` keeps them in the object store,
`following.py` reads the log after a snapshot. An actor takes part by naming its state in
`Actor.saved`.
"""
