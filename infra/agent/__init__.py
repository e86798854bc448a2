"""`penstock agent` and `penstock chat`: the harness of training on a user's files.

The folder is a sandbox (`checkout.py`), the model any chat endpoint (`model.py`, `stream.py`), the
loop that of an episode (`loop.py`), and what is shown of it text alone (`display.py`). A chat
(`chat.py`) serves its run where that is down (`endpoint.py`), and works on a copy (`workspace.py`).
An agent reports afterwards how it went (`outcome.py`): whether it finished, whether tests pass, how
much of its change is still there (`kept.py`).
"""
