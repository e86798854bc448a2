"""Environments: the sandboxes that episodes run in, their tasks, and the agent's tools.

`sandbox.py` defines the contract of a machine and `backends.py` lists its implementations:
`microvm/` on this host, `sandbox_client/` for machines on other hosts. `egress/` is the audited
proxy of a machine. `tasks/` is the task format, `factory/` makes tasks, `harness/` holds the
agent's tools. To add a part, see its folder's docstring.
"""
