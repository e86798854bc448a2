"""Snapshots of folds: the state that an actor built from the log, with the positions it stands for.

`state_tree.py` turns state into plain values and back, `stored.py` keeps them in the object store,
`following.py` reads the log from a snapshot on. An actor takes part by naming its state in
`Actor.saved`.
"""
