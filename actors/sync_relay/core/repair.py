"""Damaged tiles: the relay of a region, whose store is sound, gives what a replica's copy lacks.

```
 replica ──ReadTiles(version, tiles)──▶ relay: builds that version out of its own store
         ◀──TileRead, one a tile────────┘      (one at a time; it is rare)
```
Over the network go the damaged tiles and nothing else.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.digests import DigestTable, tile_bytes
from penstock.actors.sync_relay.core.flat_snapshot import Image
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
"""512 MiB of bf16; where more is damaged, an anchor is the better source."""
_TILE_IDLE_S = 60.0


class RepairError(PenstockError, RuntimeError):
    """A damaged copy could not be mended tile by tile."""


def tiles_service(region: str) -> str:
    """Return the name of the service that gives a region's tiles."""
    return f"tiles.{region}"


async def refetch(  # noqa: PLR0913 - what, of which version, from where
    image: Image,
    version: int,
    table: DigestTable,
    tiles: list[TileRef],
    *,
    region: str,
    ctx: Context,
) -> None:
    """Write what some tiles of a version should hold; each is proved before it is written.

    Raises:
        RepairError: nobody to ask, too many, no answer, or wrong ones.

    """
    if not region or len(tiles) > NUM_TILES_MAX:
        raise RepairError(f"weights {version}: {len(tiles)} damaged tiles, nobody to ask for them")
    missing = {(ref.tensor, ref.tile) for ref in tiles}
    request = ReadTiles(policy_version=version, tiles=tiles)
    replies = ctx.stream_request(
        tiles_service(region), request, idle_s=_TILE_IDLE_S, reason=f"tiles of weights {version}"
    )
    try:
        async for reply in replies:
            if isinstance(reply, TileRead) and table.is_tile(reply.tile, reply.data):
                ref = reply.tile
                tile = tile_bytes(image.tensors[ref.tensor], ref.tile)
                tile[...] = np.frombuffer(reply.data, np.uint8)
                missing.discard((ref.tensor, ref.tile))
    except (BusError, DeadlineError, RemoteCallError) as error:
        raise RepairError(f"weights {version}: {error}") from error
    if missing:
        raise RepairError(f"weights {version}: {len(missing)} tiles came wrong or not at all")
    _log.warning("weights %d: mended %d tiles", version, len(tiles))


Rebuild = Callable[[int], Awaitable[Image]]
"""Makes a version out of a sound store."""


class TileServer:
    """The relay's side."""

    def __init__(self, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, message: Message) -> AsyncIterator[Message]:
        """Yield every tile that was asked for, or say why not."""
        if not isinstance(message, ReadTiles) or len(message.tiles) > NUM_TILES_MAX:
            text = f"expected ReadTiles of at most {NUM_TILES_MAX} tiles"
            yield RemoteError(kind=RemoteErrorKind.INVALID, error=text)
            return
        async with self._one_at_a_time:
            try:
                image = await self._rebuild(message.policy_version)
            except (PenstockError, OSError) as error:
                yield RemoteError(kind=RemoteErrorKind.GONE, error=str(error))
                return
        for ref in message.tiles:
            if ref.tensor not in image.tensors or ref.tile < 0:
                yield RemoteError(kind=RemoteErrorKind.INVALID, error=f"no tile {ref}")
                return
            yield TileRead(tile=ref, data=tile_bytes(image.tensors[ref.tensor], ref.tile).tobytes())
