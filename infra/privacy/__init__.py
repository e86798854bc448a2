"""Whose data is where: `penstock lineage`, and `penstock erase`, which takes it away again.

`lineage.py` folds the log into who trained what; `erase.py` deletes a user's content key in order;
`retrain.py` writes a model that never had the erased.
"""
