"""What an episode happens in: sandboxes, tasks, and the agent's tools.

`sandbox.py` is the contract of a machine and `backends.py` lists who implements it: `microvm/` on
this host, `sandbox_client/` on others; `egress/` is a machine's audited proxy. `tasks/` is the task
format, `factory/` makes tasks, `harness/` is the agent's
tools, `fidelity/` compares machines. To add a part: see its folder's docstring.
"""
