"""Restricts the host process of a machine, in addition to the isolation of its backend.

```
 host ──▶ launcher (control groups, limits, separate user id) ──▶ bubblewrap (namespaces, no
          further user namespaces) ──▶ system call filter ──▶ user-mode Linux | QEMU | guest agent
```
`confinement.py` tests once which measures this host supports. The record of each machine
(`SandboxRecord.confinement`) and `penstock doctor` list those in force. To add a measure, add a
name to `Measure`, test for it in `this_host`, and apply it in `Confinement.start`.
"""
