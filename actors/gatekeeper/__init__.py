"""Gates between training and users: which version becomes `stable`, and why.

`evidence.py` is the sequential test, `power.py` how many users it takes; `users.py` makes one
observation of each user, `guards.py` compares arms by what replies look like, `offline.py` by
held-out tasks. `experiment.py` puts the live part together and `fold.py` everything: what the log
says, and what follows from it. All of these are pure; `actor.py` publishes. To add a guard: its
entry in `GUARDS` (config.py) and in `measures` (guards.py).
"""
