"""`python -m tests.sim.boots`: thousands of machines booted while everything is killed at random.

```
 episodes (this process) ──place, lease, exec──▶ scheduler ─▶ sandbox:a, sandbox:b ─▶ real machines
 chaos (this process)    ──────kill -9──────▶ a machine, a host's process, the scheduler's
```
Every round is a fleet of its own: real processes as `penstock actor` starts them, on a nats-server.
This process adopts the orphans of whatever is killed below it, so that what it counts as left over
is its own, whatever else runs on the computer.
"""
