"""The scheduler places the machines of a rollout group on one of many sandbox hosts.

`host_registry.py` records reports of hosts and chooses among them (pure); `actor.py` answers
requests. To add a placement policy, pass `SandboxScheduler` a subclass of `HostRegistry` with
another `choose_host`, and add it to `tests/lab/simulate/sandboxes/settings.py` to compare it.
"""
