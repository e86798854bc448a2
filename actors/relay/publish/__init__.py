"""The trainer's side of weight sync: encodes, uploads, verifies and commits each version.

```
 one process:  publisher.py ─▶ history.py (head)
 many ranks:   rank_uploads.py ─▶ shard_uploader.py ─▶ rank_publisher.py, verifier.py
                     └─▶ rank_committer.py ─▶ history.py (head)
```
`spans.py` divides a snapshot among verifiers, and `rank_attempt.py` has the markers that ranks
leave in the store. To publish in another way, write a class with the `prepare` method of
`policy.snapshot.SnapshotPublisher` and choose it in `infra/ranks/build.py`.
"""
