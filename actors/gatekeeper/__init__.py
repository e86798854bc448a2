"""Release gates between training and users: they decide which version becomes `stable`.

`offline.py` compares versions on held-out tasks; `users.py` reduces live traffic to one observation
per user; `guards.py` has the sequential test and compares the arms by properties of their replies;
`experiment.py` combines these into one candidate's live experiment, and `fold.py` derives the whole
state from the log. All of these are pure; `actor.py` publishes. To add a guard, add its entry to
`GUARDS` (config.py) and to `Replies.measures` (users.py).
"""
