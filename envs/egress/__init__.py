"""Network access of a machine: an audited proxy on the host that enforces a task's allow-list.

```
 program ─TCP 127.0.0.1:3128─▶ guest agent ─frames─▶ GuestStream ─▶ EgressProxy ─▶ allowed host
                                                                        └─▶ one EgressAttempt
```
A machine has no network interface and no name resolution. If a task lists hosts (`Task.egress`),
its programs find the proxy in their environment variables. `rules.py` holds the allow-list logic
and is pure, `proxy.py` speaks HTTP, `streams.py` carries bytes between the proxy and the guest
agent. To add a limit, add a field to `EgressLimits` and enforce it in `account.py`.
"""
