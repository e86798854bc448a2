"""The client of sandbox hosts: machines on other hosts, leased and used by requests.

```
 lease_sandbox ──AcquireSandbox──▶ the host placed, or any ──SandboxLeased──▶ RemoteSandbox
                                                                               │ exec, read...
                  sandbox.<host>  ◀──────── every further request ─────────────┘ + renewal
```
`client.py` sends one request and specifies a lease, `lease.py` places and holds one machine and
`group.py` a whole group; `remote_sandbox.py` speaks to a machine. To add an operation: its message
in `messages/sandbox.py`, a method in `remote_sandbox.py`, and its handler in
`actors/sandbox_host/actor.py`.
"""
