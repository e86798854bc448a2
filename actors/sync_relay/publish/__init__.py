"""The trainer's side: a version is encoded, uploaded, verified and committed to the head.

One process: `publisher.py`. Many ranks: `ranked_publisher.py` hands each version to
`publisher_rank.py`, whose ranks upload (`ranks.py`) and verify (`verifier.py`);
`committer.py` commits.
"""
