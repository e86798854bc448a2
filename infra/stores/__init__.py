"""Object stores: the claim check's other half.

A new one passes `tests/contract/stores/check_store.py`.
"""
