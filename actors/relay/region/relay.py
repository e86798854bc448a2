"""One per region: fetches every object once, and keeps the region independent of the trainer."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

from penstock.actors.relay.core.catalog import NOTHING, Catalog, num_bytes
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.relay.core.leases import leased_path
from penstock.actors.relay.core.repair import TileServer, tiles_service
from penstock.actors.relay.core.store_io import StoreIO, for_each_shard
from penstock.actors.relay.core.version_head import NO_HEAD, read_head_after
from penstock.actors.relay.region.consolidation import (
    ConsolidatingActor,
    Consolidation,
    MakeBuilder,
    Merger,
)
from penstock.actors.relay.region.retention import MERGE_EVERY
from penstock.actors.relay.replica.weight_replica import WeightReplica
from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.messages.bus import ObjectStore, Serve
from penstock.messages.errors import CorruptDataError
from penstock.messages.weights import ShardRef, WeightsPublished, WeightsRelayed

_log = logging.getLogger(__name__)


class Relay(ConsolidatingActor):
    """Follows the publisher; fills its region's store from the origin, `ctx.store`.

    An event is a wake-up: the relay advances to the head, delta by delta if it keeps up, by the
    shortest update path if it is behind. So events may come twice and in any order. A manifest
    under an older fencing token than the head's, or than one before it, is refused.
    """

    role: ClassVar[str] = "relay"

    def __init__(
        self,
        region: str,
        local: ObjectStore,
        *,
        staleness_max: int = 0,
        pinned: Collection[int] = (),
        make_builder: MakeBuilder = Merger,
    ) -> None:
        """Prepare.

        Args:
            region: Its name.
            local: Its store.
            staleness_max: Versions before the head that unconsumed trajectories can still name;
                they are kept.
            pinned: Versions that replicas of the region hold for good.
            make_builder: Makes the builder of updates; simulations model it.

        """
        super().__init__(pinned)
        self._region = region
        self._local = local
        self._staleness_max = staleness_max
        self._catalog = Catalog(local)
        self._consolidation = Consolidation(local, self._catalog, make_builder)
        self._newest: WeightsPublished | None = None
        self._head = NO_HEAD
        self._is_announced = False
        self._tiles = TileServer(self._rebuild)
        self._ctx: Context

    def services(self) -> Mapping[str, Serve]:
        """Return the service that repairs replicas' copies."""
        return {tiles_service(self._region): self._tiles.answer}

    async def start(self, ctx: Context) -> Effects:
        """List the region's versions; only the newest is announced again."""
        self._ctx = ctx
        await self._catalog.refresh()
        path = self._catalog.plan(NOTHING)
        self._newest = path[-1] if path else None
        return ()

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Bring the region to the head.

        Raises:
            DamagedStoreError: The origin's object is damaged or gone, attempt after attempt.
            OSError: No room in the region's store, after several attempts.

        """
        if event.policy_version <= self._version:
            return self._announce_again(event)
        began = ctx.monotonic()
        async with self._ahead(event, ctx) as fetched:
            path = await self._path(event, ctx)
            if fetched and all(manifest is not event for manifest in path):
                fetched.cancel()
            if not path or self._refuses(path):
                return ()
            async with leased_path(ctx.store, f"relay-{self._region}", path, ctx.now()):
                for manifest in path:
                    await (fetched if manifest is event and fetched else self._fetch(manifest, ctx))
                    await StoreIO(self._local, ctx.sleep).put_manifest(manifest)
                    self._catalog.add(manifest)
        self._newest, self._is_announced = path[-1], True
        await ctx.publish(self._relayed(path, (ctx.monotonic() - began) * 1e3))
        named = range(max(0, self._version - self._staleness_max), self._version)
        await self._consolidate(self._version, named, ctx)
        return ()

    @property
    def _version(self) -> int:
        return NOTHING if self._newest is None else self._newest.policy_version

    async def _path(self, event: WeightsPublished, ctx: Context) -> list[WeightsPublished]:
        """Return the update path: the event's own version if it is the next, or a catch-up."""
        try:
            head = self._head = await read_head_after(ctx.store, self._head)
        except CorruptDataError as error:
            _log.warning("relay %s: %s; following the events", self._region, error)
            head = NO_HEAD
        if event.policy_version > head.policy_version and event.fencing_token < head.token:
            text = f"its fencing token is {event.fencing_token}, the head's {head.token}"
            return self._refused(event, text)
        is_behind = head.policy_version - self._version > MERGE_EVERY
        if event.base_version == self._version and not is_behind:
            return [event]
        origin = Catalog(ctx.store)
        await origin.refresh()
        origin.add(event)
        origin.keep_history([head.node, (event.policy_version, event.target_root_digest)])
        path = origin.plan(self._version, max(head.policy_version, event.policy_version))
        return path or origin.plan(self._version, event.policy_version)

    @asynccontextmanager
    async def _ahead(
        self, event: WeightsPublished, ctx: Context
    ) -> AsyncGenerator[asyncio.Task[None] | None]:
        """Start to fetch a version that would be the next one, while the head is read.

        Objects fetched in vain do no harm: no manifest names them.
        """
        if event.base_version != self._version:
            yield None
            return
        fetching = asyncio.create_task(self._fetch(event, ctx))
        try:
            yield fetching
        finally:
            fetching.cancel()
            await asyncio.gather(fetching, return_exceptions=True)

    async def _fetch(self, manifest: WeightsPublished, ctx: Context) -> None:
        """Fetch and store one version's objects, several at once."""
        origin, local = (StoreIO(store, ctx.sleep) for store in (ctx.store, self._local))

        async def fetch(shard: ShardRef) -> None:
            await local.put(shard.object_key, await origin.get(shard))

        digests = [manifest.digests] if manifest.digests else []
        await for_each_shard(fetch, [*manifest.shards, *digests])

    async def _rebuild(self, version: int) -> FlatSnapshot:
        replica = WeightReplica(self._local, self._catalog)
        await replica.advance(version, self._ctx)
        return replica.snapshot

    def _announce_again(self, event: WeightsPublished) -> Effects:
        """Announce once after a start: the last one may have ended before its announcement."""
        held = self._newest
        if self._is_announced or held is None or event.policy_version < held.policy_version:
            return ()
        self._is_announced = True
        return (self._relayed([held], 0.0),)

    def _relayed(self, path: list[WeightsPublished], fetch_ms: float) -> WeightsRelayed:
        return WeightsRelayed(
            region=self._region,
            policy_version=path[-1].policy_version,
            num_bytes=sum(map(num_bytes, path)),
            fetch_ms=fetch_ms,
        )

    def _refuses(self, path: list[WeightsPublished]) -> bool:
        """Check, and log why, whether an update path is not of this run's history."""
        held = self._newest
        for manifest in path if held else ():
            assert held is not None
            if cause := _conflict(held, manifest):
                self._refused(manifest, cause)
                return True
        return False

    def _refused(self, manifest: WeightsPublished, cause: str) -> list[WeightsPublished]:
        version = manifest.policy_version
        _log.warning("relay %s refuses weights %d: %s", self._region, version, cause)
        return []


def _conflict(held: WeightsPublished, manifest: WeightsPublished) -> str:
    """Return why a manifest cannot follow the one that is held; empty if it can."""
    if held.policy_version >= manifest.policy_version:
        return ""
    if held.fencing_token > manifest.fencing_token:
        return f"its fencing token is {manifest.fencing_token}, after {held.fencing_token}"
    is_base = held.policy_version == manifest.base_version
    if is_base and held.target_root_digest != manifest.base_root_digest:
        return f"its base is {manifest.base_root_digest}, not {held.target_root_digest}"
    return ""
