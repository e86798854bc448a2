"""One per region: brings every object over once, and keeps the region able to help itself."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.catalog import NOTHING, Catalog, num_bytes
from penstock.actors.sync_relay.core.flat_snapshot import Image
from penstock.actors.sync_relay.core.head import NO_HEAD, read_head_after
from penstock.actors.sync_relay.core.leases import leased_way
from penstock.actors.sync_relay.core.repair import TileServer, tiles_service
from penstock.actors.sync_relay.core.transfer import (
    all_objects,
    get_patiently,
    over_shards,
    put_manifest,
    put_object,
)
from penstock.actors.sync_relay.region.consolidation import Consolidation
from penstock.actors.sync_relay.region.retention import FOLD_EVERY
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore, Serve
from penstock.messages.errors import CorruptDataError, StoreFullError
from penstock.messages.weights import ShardRef, WeightsPublished, WeightsRelayed

_log = logging.getLogger(__name__)


class Relay(Actor):
    """Follows the publisher; fills its region's store from the origin, `ctx.store`.

    An event is a wake-up: the relay goes to the head, by the chain where it keeps up, by whatever
    the origin has that is cheaper where it is behind. So events may come twice and in any order. A
    manifest under an older fencing token than the head's or one before it is refused.
    """

    role: ClassVar[str] = "relay"
    follows: ClassVar[tuple[type[Event], ...]] = (WeightsPublished,)

    def __init__(self, region: str, local: ObjectStore, *, staleness_max: int = 0) -> None:
        """Prepare.

        Args:
            region: its name.
            local: its store.
            staleness_max: versions that a trajectory may be older than its training; those are
                what unconsumed trajectories can still name, and are kept.

        """
        self._region = region
        self._local = local
        self._staleness_max = staleness_max
        self._catalog = Catalog(local)
        self._consolidation = Consolidation(local, self._catalog)
        self._newest: WeightsPublished | None = None
        self._head = NO_HEAD
        self._is_announced = False
        self._tiles = TileServer(self._rebuild)
        self._ctx: Context

    def services(self) -> Mapping[str, Serve]:
        """Return the service that mends replicas' copies."""
        return {tiles_service(self._region): self._tiles.answer}

    async def start(self, ctx: Context) -> Effects:
        """Look at what the region holds; only the newest of it is announced again."""
        self._ctx = ctx
        await self._catalog.refresh()
        way = self._catalog.plan(NOTHING)
        self._newest = way[-1] if way else None
        return ()

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Bring the region to the head.

        Raises:
            DamagedStoreError: the origin's object is damaged or gone, attempt after attempt.
            OSError: no room in the region's store, after several attempts.

        """
        if event.policy_version <= self._version:
            return self._announce_again(event)
        began = ctx.monotonic()
        async with self._ahead(event, ctx) as fetched:
            way = await self._way(event, ctx)
            if fetched and all(manifest is not event for manifest in way):
                fetched.cancel()
            if not way or self._refuses(way):
                return ()
            async with leased_way(ctx.store, f"relay-{self._region}", way, ctx.now()):
                for manifest in way:
                    await (fetched if manifest is event and fetched else self._fetch(manifest, ctx))
                    await put_manifest(self._local, manifest, ctx.sleep)
                    self._catalog.add(manifest)
        self._newest, self._is_announced = way[-1], True
        await ctx.publish(self._relayed(way, (ctx.monotonic() - began) * 1e3))
        await self._consolidate(ctx)
        return ()

    async def _consolidate(self, ctx: Context) -> None:
        """Make folds and anchors; where there is no room for them, at the next version."""
        needed = range(max(0, self._version - self._staleness_max), self._version)
        try:
            await self._consolidation.advance(self._version, ctx, needed=needed)
        except StoreFullError as error:
            _log.warning("relay %s: no room for folds and anchors: %s", self._region, error)

    @property
    def _version(self) -> int:
        return NOTHING if self._newest is None else self._newest.policy_version

    async def _way(self, event: WeightsPublished, ctx: Context) -> list[WeightsPublished]:
        """Return what to bring: the event's own version where it is the next, or the catch-up."""
        try:
            head = self._head = await read_head_after(ctx.store, self._head)
        except CorruptDataError as error:
            _log.warning("relay %s: %s; going by the events", self._region, error)
            head = NO_HEAD
        if event.policy_version > head.policy_version and event.fencing_token < head.token:
            text = f"its fencing token is {event.fencing_token}, the head's {head.token}"
            return self._refused(event, text)
        is_behind = head.policy_version - self._version > FOLD_EVERY
        if event.base_version == self._version and not is_behind:
            return [event]
        origin = Catalog(ctx.store)
        await origin.refresh()
        origin.add(event)
        origin.keep_history([head.node, (event.policy_version, event.target_root_digest)])
        way = origin.plan(self._version, max(head.policy_version, event.policy_version))
        return way or origin.plan(self._version, event.policy_version)

    @asynccontextmanager
    async def _ahead(
        self, event: WeightsPublished, ctx: Context
    ) -> AsyncGenerator[asyncio.Task[None] | None]:
        """Begin to fetch a version that would be the next one, while the head is asked for.

        Without a manifest, what was fetched in vain is nothing to anyone.
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

        async def bring(shard: ShardRef) -> None:
            data = await get_patiently(ctx.store, shard, ctx.sleep)
            await put_object(self._local, shard.object_key, data, ctx.sleep)

        await over_shards(bring, all_objects(manifest))

    async def _rebuild(self, version: int) -> Image:
        return await self._consolidation.rebuild(version, self._ctx)

    def _announce_again(self, event: WeightsPublished) -> Effects:
        """After a start: the last one may have ended between storing and announcing."""
        held = self._newest
        if self._is_announced or held is None or event.policy_version < held.policy_version:
            return ()
        self._is_announced = True
        return (self._relayed([held], 0.0),)

    def _relayed(self, way: list[WeightsPublished], fetch_ms: float) -> WeightsRelayed:
        return WeightsRelayed(
            region=self._region,
            policy_version=way[-1].policy_version,
            num_bytes=sum(map(num_bytes, way)),
            fetch_ms=fetch_ms,
        )

    def _refuses(self, way: list[WeightsPublished]) -> bool:
        """Tell, and say why, whether a way is not of this run's one history."""
        held = self._newest
        for manifest in way if held else ():
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
    """Say why a manifest cannot follow the one that is held; empty where it can."""
    if held.policy_version >= manifest.policy_version:
        return ""
    if held.fencing_token > manifest.fencing_token:
        return f"its fencing token is {manifest.fencing_token}, after {held.fencing_token}"
    is_base = held.policy_version == manifest.base_version
    if is_base and held.target_root_digest != manifest.base_root_digest:
        return f"its base is {manifest.base_root_digest}, not {held.target_root_digest}"
    return ""
