"""What holds a machine's host process back, around and beside the isolation of its backend.

```
 host ──▶ launcher (control groups, limits, a user of its own) ──▶ bubblewrap (namespaces, no
          further user namespaces) ──▶ system call filter ──▶ user-mode Linux | QEMU | guest agent
```
`confinement.py` tries once what this host allows; what is in force stands in each machine's record
(`SandboxRecord.confinement`) and in `penstock doctor`. To add a measure: a name in `Measure`, where
`this_host` tries it, and its part of `Confinement.start`.
"""
