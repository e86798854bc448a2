"""Session affinity: every client sends a session to the same replica, and none keeps a table.

Rendezvous hashing: of all replicas, the one whose hash with the session is the highest. A replica
that leaves moves its own sessions alone, evenly to the others; one that joins takes only what
becomes its own. Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates,
1998.
"""

from collections.abc import Iterable
from hashlib import blake2b


def preferred(session_id: str, replicas: Iterable[str]) -> str | None:
    """Return the replica that a session belongs to, or None if there is none."""
    return max(replicas, key=lambda replica: (_score(session_id, replica), replica), default=None)


def _score(session_id: str, replica: str) -> bytes:
    return blake2b(f"{replica}\0{session_id}".encode(), digest_size=8).digest()
