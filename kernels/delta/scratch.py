"""Memory that a thread works in, kept from one call to the next.

The first touch of fresh memory can take longer than all coding in it, so that nothing of the size
of an array is made again for each one.
"""

import threading

import numpy as np

_KEPT_BYTES_MAX = 64 << 20


class _Kept(threading.local):
    """By name, what this thread holds."""

    def __init__(self) -> None:
        self.rooms: dict[str, np.ndarray] = {}


_kept = _Kept()


def room(name: str, num_bytes: int) -> np.ndarray:
    """Return uint8 [num_bytes] of this thread: what its last one of that name held is lost.

    Rooms of more than 64 MiB are not kept.
    """
    found = _kept.rooms.get(name)
    if found is None or found.size < num_bytes:
        found = np.empty(num_bytes, np.uint8)
        if num_bytes <= _KEPT_BYTES_MAX:
            _kept.rooms[name] = found
    return found[:num_bytes]
