"""Places the machines of a rollout group on one of many sandbox hosts.

`host_registry.py` holds what hosts report and chooses among them (pure), `actor.py` answers
requests. To add a placement policy: a subclass of `HostRegistry` with its own `choose_host`, passed
to `SandboxScheduler`, and a line in `tests/lab/simulate/sandboxes/settings.py` to compare it.
"""
