"""Client of the sandbox hosts: leases machines on other hosts and uses them through requests.

```
 lease_sandbox ──AcquireSandbox──▶ the chosen host, or any ──SandboxLeased──▶ RemoteSandbox
                                                                               │ exec, read...
                  sandbox.<host>  ◀──────── every further request ─────────────┘ + renewal
```
`client.py` leases a machine and talks to it, `group.py` leases a group of machines. To add an
operation, add its message in `messages/sandbox.py`, a method of `RemoteSandbox`, and a handler in
`actors/sandbox_host/actor.py`.
"""
