"""Places the machines of a rollout group on one of many sandbox hosts.

`host_registry.py` holds what hosts report, `placement.py` chooses a host (pure), `actor.py` answers
requests. Another placement policy is one function in `placement.py`.
"""
