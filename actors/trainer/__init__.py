"""The trainer: mid-training, then one optimizer step for each batch manifest of the log.

Recipe: a new advantage estimator, off-policy correction or loss is one function in `advantages.py`,
`corrections.py` or `losses.py`, one line in the table there, and its name in `config.py`.
"""
