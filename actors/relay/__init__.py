"""Weight sync: brings each policy version from the trainer to every generator.

```
 trainer ─ Publisher ─▶ origin store ─▶ Relay, per region ─▶ region store ─▶ Receiver, per replica:
              │ full, then deltas          │ fetches each object once            │ stages, verifies,
              │                            │ merges deltas                       │ swaps
              └─ WeightsPublished ────────▶└─ WeightsRelayed ───────────────────▶└─ WeightsApplied
```
Events only wake readers up; the stores are the source of truth. A replica that falls behind,
restarts or finds a wrong digest recovers from tiles, merged deltas and full snapshots of its region
and never asks the trainer, which uploads only deltas after version 0. docs/weight-sync.md has the
protocol.

- `core/`: what all sides share: objects, manifests, digests, the head, leases, the catalog.
- `publish/`: the trainer's side, in one process or on many ranks.
- `region/`: the relay of a region, the compactor of the origin, and the retention that both apply.
- `replica/`: one copy of the weights, and the receiver that updates an engine from it.

Decisions are pure functions of manifests: `core/catalog.shortest_update_path` (how to catch up) and
`region/retention` (which updates are made and kept). To add a kind of update, add a member of
`SnapshotKind`, its key in `core/objects.py`, and the condition for making it in
`region/retention.py`.
"""
