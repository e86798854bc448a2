"""The relay of a region: fetches every object once, on behalf of all replicas of its region."""

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

log = logging.getLogger(__name__)


class Relay(ConsolidatingActor):
    """Follows the publisher and fills its region's store from the origin, `ctx.store`.

    An event only wakes the relay up. It advances to the head, delta by delta if it keeps up and by
    the shortest update path if it is behind, so events may arrive twice and in any order. Manifests
    with an older fencing token than the head's, or than that of the version held, are refused.
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
        """Initialize without reading anything.

        Args:
            region: Name of the region.
            local: Store of the region.
            staleness_max: Number of versions before the head to keep, because unconsumed
                trajectories can still refer to them.
            pinned: Versions that replicas of the region hold permanently.
            make_builder: Function that creates the builder of updates; simulations replace it.

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
        """Return the service that sends tiles to replicas with damaged weights."""
        return {tiles_service(self._region): self._tiles.answer}

    async def start(self, ctx: Context) -> Effects:
        """List the versions in the region's store."""
        self._ctx = ctx
        await self._catalog.refresh()
        path = self._catalog.plan(NOTHING)
        self._newest = path[-1] if path else None
        log.info("region %s holds version %d", self._region, self._version)
        return ()

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Bring the region to the head.

        Raises:
            DamagedStoreError: An object of the origin was damaged or missing in every attempt.
            OSError: The region's store has no room, after several attempts.

        """
        # Events are redelivered, and a catch-up passes versions whose events arrive later.
        if event.policy_version <= self._version:
            return self._announce_again(event)
        began = ctx.monotonic()
        async with self._ahead(event, ctx) as fetched:
            path = await self._path(event, ctx)
            # The path leaves the event's version out: it was refused, or a merged delta is shorter.
            if fetched and all(manifest is not event for manifest in path):
                fetched.cancel()
            if not path or self._refuses(path):
                return ()
            async with leased_path(ctx.store, f"relay-{self._region}", path, ctx.now()):
                for manifest in path:
                    await (fetched if manifest is event and fetched else self._fetch(manifest, ctx))
                    # After its objects: a manifest in the region's store promises all of them.
                    await StoreIO(self._local, ctx.sleep).put_manifest(manifest)
                    self._catalog.add(manifest)
        self._newest, self._is_announced = path[-1], True
        relayed = self._relayed(path, (ctx.monotonic() - began) * 1e3)
        log.info(
            "relayed version %d to %s: %d updates, %d bytes in %.0f ms",
            relayed.policy_version,
            self._region,
            len(path),
            relayed.num_bytes,
            relayed.fetch_ms,
        )
        # Published before consolidation, which takes long and must not delay the replicas.
        await ctx.publish(relayed)
        named = range(max(0, self._version - self._staleness_max), self._version)
        await self._consolidate(self._version, named, ctx)
        return ()

    @property
    def _version(self) -> int:
        return NOTHING if self._newest is None else self._newest.policy_version

    async def _path(self, event: WeightsPublished, ctx: Context) -> list[WeightsPublished]:
        """Return the event's version if it is the next one, or else the path to catch up."""
        try:
            head = self._head = await read_head_after(ctx.store, self._head)
        except CorruptDataError as error:
            # Events alone still order versions; only the check against stale publishers is weaker.
            log.warning("damaged head, following the events instead: %s", error)
            head = NO_HEAD
        if event.policy_version > head.policy_version and event.fencing_token < head.token:
            text = f"its fencing token is {event.fencing_token}, the head's {head.token}"
            return self._refused(event, text)
        # Further behind than a merged delta spans, the shortest path saves bytes.
        is_behind = head.policy_version - self._version > MERGE_EVERY
        if event.base_version == self._version and not is_behind:
            return [event]
        origin = Catalog(ctx.store)
        await origin.refresh()
        origin.add(event)
        origin.keep_history([head.node, (event.policy_version, event.target_root_digest)])
        path = origin.plan(self._version, max(head.policy_version, event.policy_version))
        # Without a path to the head, the event's own version is still progress.
        return path or origin.plan(self._version, event.policy_version)

    @asynccontextmanager
    async def _ahead(
        self, event: WeightsPublished, ctx: Context
    ) -> AsyncGenerator[asyncio.Task[None] | None]:
        """Start to fetch the event's version while the head is read, if it is the next one."""
        # This hides a round trip. Objects fetched in vain do no harm: no manifest names them.
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
        """Fetch one version's objects from the origin and store them in the region."""
        origin, local = (StoreIO(store, ctx.sleep) for store in (ctx.store, self._local))

        async def fetch(shard: ShardRef) -> None:
            await local.put(shard.object_key, await origin.get(shard))

        digests = [manifest.digests] if manifest.digests else []
        await for_each_shard(fetch, [*manifest.shards, *digests])

    async def _rebuild(self, version: int) -> FlatSnapshot:
        # Without a region: a relay that asked itself for tiles would wait for itself.
        replica = WeightReplica(self._local, self._catalog)
        await replica.advance(version, self._ctx)
        return replica.snapshot

    def _announce_again(self, event: WeightsPublished) -> Effects:
        """Announce the version held, once after a start."""
        # The relay may have been killed after it stored the version and before it announced it.
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
        """Return whether an update path conflicts with the version held, and log why."""
        held = self._newest
        for manifest in path if held else ():
            assert held is not None
            if cause := _conflict(held, manifest):
                self._refused(manifest, cause)
                return True
        return False

    def _refused(self, manifest: WeightsPublished, cause: str) -> list[WeightsPublished]:
        version = manifest.policy_version
        log.warning("refusing version %d: %s", version, cause)
        return []


def _conflict(held: WeightsPublished, manifest: WeightsPublished) -> str:
    """Return the reason why a manifest cannot follow the one held; empty if it can."""
    if held.policy_version >= manifest.policy_version:
        return ""
    if held.fencing_token > manifest.fencing_token:
        return f"its fencing token is {manifest.fencing_token}, after {held.fencing_token}"
    is_base = held.policy_version == manifest.base_version
    if is_base and held.target_root_digest != manifest.base_root_digest:
        return f"its base is {manifest.base_root_digest}, not {held.target_root_digest}"
    return ""
