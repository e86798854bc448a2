"""`simulate-sandboxes`: a burst of machines through the real scheduler and client.

`settings.py` is the scenario; `host.py` models a host, `hosts.py` serves all of them; `clients.py`
leases and holds. `virtual.py` runs them on virtual time, `nats.py` over a real server. To compare
another policy: a line in `settings.POLICIES`.
"""
