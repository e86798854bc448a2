"""Events as JSON lines, decoded without their types: `penstock log cat` reads any version's log."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import msgspec

from penstock.infra.bus.jetstream.log_reader import RawMessage

_BYTES_MAX = 64 << 20
"""Larger messages are shown by their size."""
_ITEMS_MAX = 1 << 20
"""In one message, all lists and maps together."""
_DEPTH_MAX = 64
_REJECTED = "MessageRejected"
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def plain_map(data: bytes) -> dict[str, Any] | None:
    """Decode a msgpack map of unknown type, within bounds; None for anything else."""
    if len(data) > _BYTES_MAX:
        return None
    num_items = 0

    def count(items: list[Any]) -> list[Any]:
        """Bound what small bytes can unpack to: a million empty maps take a byte each."""
        nonlocal num_items
        num_items += 1 + len(items)
        if num_items > _ITEMS_MAX:
            raise ValueError("too many items")
        return items

    def fields(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        if any(isinstance(key, dict | list) for key, _ in pairs):
            raise ValueError("a key is no scalar")
        return {str(key): each for key, each in count(pairs)}

    try:
        value = _unpack(
            data,
            strict_map_key=False,
            unicode_errors="replace",
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            list_hook=count,
            object_pairs_hook=fields,
        )
    except (ValueError, msgpack.UnpackException):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


async def cat_log(
    messages: AsyncGenerator[RawMessage, None], types: Collection[str]
) -> AsyncIterator[str]:
    """Yield one JSON line per event of the types, or of all; arrays are shown by dtype and shape.

    A rejected message is shown by what it holds, where that is a map.
    """
    async for message in messages:
        kind = message.subject.split(".")[3]
        if types and kind not in types:
            continue
        fields = plain_map(message.data)
        if fields is None:
            fields = {"type": kind, "undecodable": message.data}
        elif kind == _REJECTED and isinstance(rejected := fields.get("data"), bytes):
            fields["data"] = plain_map(rejected) or rejected
        place = {"stream": message.stream, "sequence": message.sequence}
        line = place | _readable(fields) | place  # a field of the same name does not hide it
        yield msgspec.json.encode(line).decode()


def _readable(value: Any, depth: int = 0) -> Any:
    if depth > _DEPTH_MAX:
        return "<nested too deep>"
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: _readable(each, depth + 1) for key, each in fields.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if len(items) == 3 and isinstance(items[0], str) and isinstance(items[2], bytes):
            return f"{items[0]}{_readable(items[1], depth + 1)}"
        return [_readable(item, depth + 1) for item in items]
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return value if value is None or isinstance(value, str | int | float) else str(value)
