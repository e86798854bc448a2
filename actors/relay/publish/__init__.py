"""The trainer's side of weight sync: encodes, uploads, verifies and commits each version.

```
 one process:  publisher.py ─▶ history.py (head)
 many ranks:   multi_rank_publisher.py ─▶ rank_actor.py ─▶ rank_publisher.py, verifier.py
                     └─▶ rank_committer.py ─▶ history.py (head)
```
`spans.py` divides a snapshot among ranks and verifiers, `handover.py` is the memory that ranks
share with the trainer, and `rank_attempt.py` has the markers that they leave in the store. To
publish in another way, write a class with the `prepare` method of
`policy.snapshot.SnapshotPublisher` and choose it in `infra/run/roles.py`.
"""
