"""Machines on other hosts, spoken to by requests.

```
 lease_sandbox ──AcquireSandbox──▶ the host placed, or any ──SandboxLeased──▶ RemoteSandbox
                                                                               │ exec, read...
                  sandbox.<host>  ◀──────── every further request ─────────────┘ + renewal
```
`spec.py` says how a machine is asked for, `placing.py` finds its host, `lease.py` holds one and
`group.py` a whole group's; `sandbox.py` speaks to one; `asking.py` is one request.
"""
