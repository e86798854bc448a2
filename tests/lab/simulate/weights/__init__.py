"""Weight sync at a size that no test machine has: real decisions, modeled bytes, virtual time.

Real: ranks, verifiers and committer, with their markers, manifests and head, over small arrays;
keys; the catalog and its choice of the shortest update path; puts and gets with their checks and
retries; when a relay merges deltas and what it keeps; leases; the virtual clock.
Modeled: an object has the size of the large model's; a transfer queues for each link that it
crosses; sizes are drawn from measured ratios; coding takes the time that the measured speeds give,
and a merged delta is its size alone; the bus is a delay of half a round trip.

```
 trainer: encode ▶ 512 ranks upload ▶ manifest     region: relay fetches ▶ region store ▶ replicas
             origin store  ◀──── the region's link ────┘    └ merges deltas     plan, fetch, ┘
                                                                                decode, swap
```
To add a scenario: a `Mishap` in `command.py`.
"""
