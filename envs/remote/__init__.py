"""Machines on other hosts, spoken to by requests.

```
 lease_sandbox ──AcquireSandbox──▶ the host placed, or any ──SandboxLeased──▶ RemoteSandbox
                                                                               │ exec, read...
                  sandbox.<host>  ◀──────── every further request ─────────────┘ + renewal
```
`client.py` sends one request and specifies a lease, `lease.py` places and holds one machine and
`group.py` a whole group; `sandbox.py` speaks to a machine. To add an operation: its message in
`messages/sandbox.py`, a method in `sandbox.py`, and its handler in
`actors/sandbox_host/operations.py`.
"""
