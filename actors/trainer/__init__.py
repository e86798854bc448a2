"""The trainer: mid-training, then one optimizer step for each batch manifest of the log.

To add an advantage estimator, an off-policy correction or a loss, see `objective/__init__.py`.
"""
