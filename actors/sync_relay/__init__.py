"""The way of a policy version from the trainer to every generator.

```
 trainer ─ Publisher ─▶ origin store ─▶ Relay, one per region ─▶ region store ─▶ Receiver, one a
              │ anchor, then deltas       │ fetches each object once             │ replica: stages,
              │                           │ folds, anchors                       │ verifies, swaps
              └─ WeightsPublished ───────▶└─ WeightsRelayed ────────────────────▶└─ WeightsApplied
```
Events are wake-ups; what a store holds is the truth. Whoever falls behind, restarts, or finds a
digest wrong goes to the region's own tiles, folds and anchors, never back to the trainer: after
version 0 the trainer uploads deltas alone. docs/weight-sync.md has the protocol.

Where a snapshot is held by many ranks, `ranks`, `prover` and `committer` stand in the publisher's
place; `publisher_rank` and `ranked_publisher` make actors of them.

What is decided is apart from what is done: `catalog.cheapest_way` (how to catch up) and
`retention` (what is made and kept) are pure functions of manifests; `head` fences publishers,
`mirror` moves one copy, `repair` mends it, `consolidation` carries `retention` out.
"""
