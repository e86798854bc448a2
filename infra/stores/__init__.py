"""Object stores: events carry keys, what is large lies here (the claim-check pattern).

To add one: a class that passes `tests/contract/stores/check_store.py`, its `StoreKind` in
`settings.py`, and its case in `open.py`.
"""
