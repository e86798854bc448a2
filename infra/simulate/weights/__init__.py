"""Weight sync at a size that no test machine has: real decisions, modeled bytes, virtual time.

Real: ranks, provers and committer, with their receipts, proofs, manifests and head, over
small arrays; keys; the catalog and its choice of the cheapest way (chain, folds or anchor); puts
and gets with their checks and attempts; when a relay folds and anchors and what it keeps; leases;
the virtual clock.
Modeled: an object has the size of the large model's; a transfer is a place in the queue of each
wire it crosses; sizes are drawn from measured ratios; coding takes the time that the measured
speeds give, and a fold is its size alone; the bus is a delay of half a round trip.

```
 trainer: encode ▶ 512 ranks upload ▶ manifest     region: relay fetches ▶ region store ▶ replicas
             origin store  ◀──── the region's wire ────┘    └ folds, anchors      └ plan, fetch,
                                                                                    decode, swap
```
"""
