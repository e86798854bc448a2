"""`penstock lineage` shows whose data trained what; `penstock erase` erases a user's data.

`lineage.py` folds the log into who trained what. `erase.py` deletes a user's content key, in order,
and retrains a model without the erased.
"""
