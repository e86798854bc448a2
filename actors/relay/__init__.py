"""Weight sync: a policy version from the trainer to every generator.

```
 trainer ─ Publisher ─▶ origin store ─▶ Relay, per region ─▶ region store ─▶ Receiver, per replica:
              │ full, then deltas          │ fetches each object once            │ stages, verifies,
              │                            │ merges deltas                       │ swaps
              └─ WeightsPublished ────────▶└─ WeightsRelayed ───────────────────▶└─ WeightsApplied
```
Events are wake-ups; the stores hold the truth. A replica that is behind, restarts, or finds a wrong
digest uses the region's own tiles, merged deltas and full snapshots, never the trainer: after
version 0 the trainer uploads deltas alone. docs/weight-sync.md has the protocol.

- `core/`: what all sides share: objects, manifests, digests, the head, leases, the catalog.
- `publish/`: the trainer's side, in one process or on many ranks.
- `region/`: the relay of a region, the compactor of the origin, and what both keep.
- `replica/`: one copy of the weights, and the receiver that updates an engine from it.

Decisions are pure functions of manifests: `core/catalog.shortest_update_path` (how to catch up) and
`region/retention` (what is made and kept). To add a kind of update: a member of `SnapshotKind`, its
key in `core/objects.py`, and when it is made in `region/retention.py`.
"""
