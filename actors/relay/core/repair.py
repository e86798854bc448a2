"""Damaged tiles of a replica's copy, fetched from its region's relay, whose store is sound.

```
 replica ──ReadTiles(version, tiles)──▶ relay: builds that version from its own store
         ◀──TileRead, one per tile────┘      (one at a time; it is rare)
```
Nothing but the damaged tiles crosses the network.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from penstock.actors.relay.core.digests import DigestTable, tile_bytes
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.runtime.context import Context
from penstock.messages.base import Message
from penstock.messages.errors import (
    BusError,
    DeadlineError,
    PenstockError,
    RemoteCallError,
)
from penstock.messages.rpc import RemoteError, RemoteErrorKind
from penstock.messages.weights import ReadTiles, TileRead, TileRef

_log = logging.getLogger(__name__)
NUM_TILES_MAX = 4096
"""512 MiB of bf16; a copy with more damage starts from a full snapshot."""
_TILE_IDLE_S = 60.0


class RepairError(PenstockError, RuntimeError):
    """A damaged copy could not be repaired tile by tile."""


def tiles_service(region: str) -> str:
    """Return the name of the service that serves a region's tiles."""
    return f"tiles.{region}"


async def refetch(  # noqa: PLR0913 - what, of which version, from where
    flat: FlatSnapshot,
    version: int,
    table: DigestTable,
    tiles: list[TileRef],
    *,
    region: str,
    ctx: Context,
) -> None:
    """Overwrite damaged tiles of a version; each is verified before it is written.

    Raises:
        RepairError: No relay to ask, too many tiles, no reply, or wrong ones.

    """
    if not region or len(tiles) > NUM_TILES_MAX:
        raise RepairError(f"weights {version}: {len(tiles)} damaged tiles that no relay can repair")
    missing = {(ref.tensor, ref.tile) for ref in tiles}
    request = ReadTiles(policy_version=version, tiles=tiles)
    replies = ctx.stream_request(
        tiles_service(region), request, idle_s=_TILE_IDLE_S, reason=f"tiles of weights {version}"
    )
    try:
        async for reply in replies:
            if isinstance(reply, TileRead) and table.is_tile(reply.tile, reply.data):
                ref = reply.tile
                tile = tile_bytes(flat.tensors[ref.tensor], ref.tile)
                tile[...] = np.frombuffer(reply.data, np.uint8)
                missing.discard((ref.tensor, ref.tile))
    except (BusError, DeadlineError, RemoteCallError) as error:
        raise RepairError(f"weights {version}: {error}") from error
    if missing:
        raise RepairError(f"weights {version}: {len(missing)} tiles came damaged or not at all")
    _log.warning("weights %d: repaired %d tiles", version, len(tiles))


Rebuild = Callable[[int], Awaitable[FlatSnapshot]]
"""Builds a version from a sound store."""


class TileServer:
    """The relay's side."""

    def __init__(self, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, message: Message) -> AsyncIterator[Message]:
        """Yield every requested tile, or the error."""
        if not isinstance(message, ReadTiles) or len(message.tiles) > NUM_TILES_MAX:
            text = f"expected ReadTiles of at most {NUM_TILES_MAX} tiles"
            yield RemoteError(kind=RemoteErrorKind.INVALID, error=text)
            return
        async with self._one_at_a_time:
            try:
                flat = await self._rebuild(message.policy_version)
            except (PenstockError, OSError) as error:
                yield RemoteError(kind=RemoteErrorKind.GONE, error=str(error))
                return
        for ref in message.tiles:
            if ref.tensor not in flat.tensors or ref.tile < 0:
                yield RemoteError(kind=RemoteErrorKind.INVALID, error=f"no tile {ref}")
                return
            yield TileRead(tile=ref, data=tile_bytes(flat.tensors[ref.tensor], ref.tile).tobytes())
