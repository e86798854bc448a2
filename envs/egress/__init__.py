"""A machine's only network access: an audited proxy on the host that knows a task's allow-list.

```
 program ─TCP 127.0.0.1:3128─▶ guest agent ─frames─▶ GuestStream ─▶ EgressProxy ─▶ an allowed host
                                                                        └─▶ EgressAttempt, each
```
A machine has no network and no name resolution. If a task lists hosts (`Task.egress`), its programs
find a proxy in their environment; everything else stays as it is. `rules.py` decides and is pure,
`proxy.py` speaks HTTP, `streams.py` carries bytes between it and the guest agent. To add a bound: a
field of `EgressLimits`, enforced in `account.py`.
"""
