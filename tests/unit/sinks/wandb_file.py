"""Reads W&B's offline file with W&B's own records: blocks of 32 KiB as LevelDB's log has them."""

import json
import struct
from pathlib import Path
from typing import Any

BLOCK, HEADER = 32 << 10, 7
PREAMBLE = 7
"""`:W&B`, a magic number and a version."""


def _records(data: bytes) -> list[bytes]:
    place, parts, records = PREAMBLE, [], []
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts.append(data[place + HEADER : place + HEADER + size])
        place += HEADER + size
        if kind in {1, 4}:  # whole, or last
            records.append(b"".join(parts))
            parts = []
    return records


def history(path: Path) -> list[dict[str, Any]]:
    """Return the rows that were logged."""
    from wandb.proto.wandb_internal_pb2 import Record

    data = path.read_bytes()
    assert data[:4] == b":W&B"
    rows = []
    for record in _records(data):
        message = Record.FromString(record)
        if message.WhichOneof("record_type") == "history":
            items = message.history.item
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
    return rows
