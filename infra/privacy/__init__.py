"""`penstock lineage` shows whose data trained what; `penstock erase` erases a user's data.

`lineage.py` computes from the log who trained what. `erase.py` deletes a user's content key and
retrains a model without erased users.
"""
