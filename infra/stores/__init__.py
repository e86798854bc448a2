"""Object stores: the claim check's other half. A new one passes `tests/contract/check_store.py`."""
