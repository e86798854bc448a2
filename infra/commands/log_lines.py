"""Events as JSON lines, decoded without their types: `penstock log cat` reads any version's log."""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import msgspec

from penstock.infra.bus.jetstream.log_reader import RawMessage

_BYTES_MAX = 64 << 20
"""Larger messages are shown by their size."""
_ITEMS_MAX = 1 << 20
_REJECTED = "MessageRejected"
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def plain_map(data: bytes) -> dict[str, Any] | None:
    """Decode a msgpack map of unknown type, within bounds; None for anything else."""
    if len(data) > _BYTES_MAX:
        return None
    try:
        value = _unpack(
            data,
            strict_map_key=False,
            unicode_errors="replace",
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
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
        line = {"stream": message.stream, "sequence": message.sequence, **_readable(fields)}
        yield msgspec.json.encode(line).decode()


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _readable(v) for k, v in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if len(items) == 3 and isinstance(items[2], bytes):
            return f"{items[0]}{items[1]}"
        return [_readable(item) for item in items]
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return value if value is None or isinstance(value, str | int | float) else str(value)
