"""Chat formats: messages to token ids, sampled ids to calls.

`format.py` is what rollout workers, the gateway and fine-tuning know of a format; `builtin.py` is
the one that policies trained here from nothing have, `renderers.py` those of published models.
To add one: a class that meets `ChatFormat`, and its line in `open.py`.
"""
