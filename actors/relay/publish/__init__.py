"""The trainer's side: a version is encoded, uploaded, verified and committed to the head.

```
 one process:  publisher.py ─▶ upload.py ─▶ history.py (head)
 many ranks:   multi_rank_publisher.py ─▶ rank_actor.py ─▶ rank_publisher.py, verifier.py
                     └─▶ rank_committer.py ─▶ history.py (head)
```
`spans.py` divides a snapshot among ranks and verifiers, `handover.py` is the memory that they share
with the trainer, `rank_attempt.py` the markers that they leave in the store. To publish in another
way: a class with the `prepare` of `policy.snapshot.SnapshotPublisher`, chosen in
`infra/run/roles.py`.
"""
