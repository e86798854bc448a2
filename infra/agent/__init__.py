"""`penstock agent` and `penstock chat`: the harness of training on a user's own files.

The folder acts as a sandbox (`checkout.py`), any chat endpoint as the model (`model.py`,
`stream.py`). `loop.py` is the loop of an episode, and `display.py` shows it as plain text. A chat
(`chat.py`) works on a copy of the folder, and serves its run if nothing serves it (`endpoint.py`).
Afterwards `outcome.py` reports whether the agent finished, whether tests pass, and how much of its
change is still there.
"""
