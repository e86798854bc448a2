"""Chat formats: render messages to token ids and parse sampled ids to tool calls.

`format.py` defines the interface that rollout workers, the gateway and fine-tuning use.
`builtin.py` is the format of policies trained from scratch here, `renderers.py` has the formats of
published models. To add a format, write a class that implements `ChatFormat` and add a line to
`open.py`.
"""
