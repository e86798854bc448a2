"""Client of the sandbox hosts: leases machines on other hosts and uses them through requests.

```
 lease_sandbox ──AcquireSandbox──▶ the chosen host, or any ──SandboxLeased──▶ RemoteSandbox
                                                                               │ exec, read...
                  sandbox.<host>  ◀──────── every further request ─────────────┘ + renewal
```
`client.py` sends a request and defines what a lease specifies, `lease.py` places and holds one
machine, `group.py` does so for a group of machines, and `remote_sandbox.py` talks to a machine. To
add an operation, add its message in `messages/sandbox.py`, a method in `remote_sandbox.py`, and a
handler in `actors/sandbox_host/actor.py`.
"""
