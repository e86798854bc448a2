"""Repairs damaged tiles of a replica's weights with tiles from the region's relay.

```
 replica ──ReadTiles(version, tiles)──▶ relay: builds the version from its own store
         ◀──TileRead, one per tile────┘      (one at a time, as it is rare)
```
Only the damaged tiles cross the network.
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

log = logging.getLogger(__name__)
NUM_TILES_MAX = 4096
"""Largest number of tiles to repair, 512 MiB of bf16; a replica with more damage starts from a full
snapshot."""
_TILE_IDLE_S = 60.0
"""Longest wait for the next tile in seconds; the relay may have to build the version first."""


class RepairError(PenstockError, RuntimeError):
    """Damaged weights could not be repaired tile by tile."""


def tiles_service(region: str) -> str:
    """Return the name of the service that returns a region's tiles."""
    return f"tiles.{region}"


async def refetch_tiles(  # noqa: PLR0913 - target, version, tiles and source
    flat: FlatSnapshot,
    version: int,
    table: DigestTable,
    tiles: list[TileRef],
    *,
    region: str,
    ctx: Context,
) -> None:
    """Overwrite damaged tiles of a version; verify each tile before writing it.

    Raises:
        RepairError: There is no relay, there are too many tiles, or the relay returned no tiles or
            damaged ones.

    """
    if not region or len(tiles) > NUM_TILES_MAX:
        raise RepairError(
            f"weights {version}: {len(tiles)} damaged tiles, expected a relay and at most"
            f" {NUM_TILES_MAX} tiles to repair them"
        )
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
        raise RepairError(
            f"weights {version}: {len(missing)} of {len(tiles)} tiles arrived damaged or not at all"
        )
    log.warning("weights %d: repaired %d damaged tiles from the relay", version, len(tiles))


Rebuild = Callable[[int], Awaitable[FlatSnapshot]]
"""Function that builds a version from the relay's store."""


class TileServer:
    """The relay's side of tile repair."""

    def __init__(self, rebuild: Rebuild) -> None:
        self._rebuild = rebuild
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, message: Message) -> AsyncIterator[Message]:
        """Yield every requested tile, or an error."""
        if not isinstance(message, ReadTiles) or len(message.tiles) > NUM_TILES_MAX:
            text = f"expected ReadTiles of at most {NUM_TILES_MAX} tiles"
            yield RemoteError(kind=RemoteErrorKind.INVALID, error=text)
            return
        # A rebuilt version takes the memory of a whole snapshot.
        async with self._one_at_a_time:
            try:
                flat = await self._rebuild(message.policy_version)
            except (PenstockError, OSError) as error:
                log.warning("cannot serve tiles of weights %d: %s", message.policy_version, error)
                yield RemoteError(kind=RemoteErrorKind.GONE, error=str(error))
                return
        log.info("serving %d tiles of weights %d", len(message.tiles), message.policy_version)
        for ref in message.tiles:
            if ref.tensor not in flat.tensors or ref.tile < 0:
                yield RemoteError(kind=RemoteErrorKind.INVALID, error=f"no tile {ref}")
                return
            yield TileRead(tile=ref, data=tile_bytes(flat.tensors[ref.tensor], ref.tile).tobytes())
