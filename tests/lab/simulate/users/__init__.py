"""`simulate-users`: users with preferences of their own, and a service that learns them.

`people.py` holds what only the users know, `tiny_policy.py` the policy and its replies,
`service.py` the real actors, `virtual_io.py` time that jumps while nobody waits. The parts:
`learning.py` (do rewards reach the policy, and how many), `attack.py` (does one key move others'
policy), `experiments.py` (do gates promote or roll back for nothing), `latency.py` (how long from
feedback to a reply that it changed). `command.py` runs them.
"""
