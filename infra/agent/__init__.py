"""`penstock agent`: the harness of training on a user's checkout, and what became of its work.

The checkout is a sandbox (`checkout.py`), the model any chat endpoint (`model.py`), the loop that
of an episode (`loop.py`). Afterwards the command reports how it went (`outcome.py`):
whether the agent finished, whether tests pass, how much of its change is still there (`kept.py`).
"""
