"""The way of a policy version from the trainer to every generator.

```
 trainer ─ Publisher ─▶ origin store ─▶ Relay, one a region ─▶ region store ─▶ Receiver, one a
              │ anchor, then deltas       │ fetches each object once             │ replica: stages,
              │                           │ folds, anchors                       │ verifies, swaps
              └─ WeightsPublished ───────▶└─ WeightsRelayed ────────────────────▶└─ WeightsApplied
```
Events are wake-ups; what a store holds is the truth. Whoever falls behind, restarts, or finds a
digest wrong goes to the region's own anchors and folds, never back to the trainer: after version 0
the trainer uploads deltas alone.
"""
