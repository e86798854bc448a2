"""One a region: brings every object over once, and keeps the region able to help itself."""

import logging
from typing import ClassVar

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.catalog import Catalog, num_bytes
from penstock.actors.sync_relay.consolidation import Consolidation
from penstock.actors.sync_relay.transfer import get_patiently, replace_version
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import WeightsPublished, WeightsRelayed

_log = logging.getLogger(__name__)


class Relay(Actor):
    """Follows the publisher; fills its region's store from the origin, `ctx.store`.

    A version that is here, or older than what the region keeps, is passed over, so events may come
    twice and in any order. A manifest under an older fencing token than one before it is refused.
    """

    role: ClassVar[str] = "relay"
    follows: ClassVar[tuple[type[Event], ...]] = (WeightsPublished,)

    def __init__(self, region: str, local: ObjectStore) -> None:
        self._region = region
        self._local = local
        self._catalog = Catalog(local)
        self._consolidation = Consolidation(local, self._catalog)
        self._newest: WeightsPublished | None = None

    async def start(self, ctx: Context) -> Effects:
        """Look at what the region holds; only the newest of it is announced again."""
        await self._catalog.refresh()
        fetched = [m for m in self._catalog.manifests if m.base_version == m.policy_version - 1]
        self._newest = max(fetched, key=lambda manifest: manifest.policy_version, default=None)
        return ()

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Bring one version over.

        Raises:
            DamagedStoreError: the origin's object is damaged or gone, attempt after attempt.
            OSError: no room in the region's store, after several attempts.

        """
        held = self._catalog.find(event.policy_version, event.kind)
        if held is not None:
            return (self._relayed(held, 0.0),) if held == self._newest else ()
        if event.policy_version <= self._consolidation.oldest_version or self._refuses(event):
            return ()
        began = ctx.monotonic()
        objects = {
            shard.object_key: await get_patiently(ctx.store, shard, ctx.sleep)
            for shard in event.shards
        }
        await replace_version(self._local, event, objects, ctx.sleep)
        self._catalog.add(event)
        await ctx.publish(self._relayed(event, (ctx.monotonic() - began) * 1e3))
        await self._consolidation.advance(ctx)
        return ()

    def _relayed(self, manifest: WeightsPublished, fetch_ms: float) -> WeightsRelayed:
        return WeightsRelayed(
            region=self._region,
            policy_version=manifest.policy_version,
            num_bytes=num_bytes(manifest),
            fetch_ms=fetch_ms,
        )

    def _refuses(self, event: WeightsPublished) -> bool:
        """Tell, and say why, whether a manifest is not of this run's one history."""
        cause = next(filter(None, (_conflict(held, event) for held in self._catalog.manifests)), "")
        if cause:
            _log.warning(
                "relay %s refuses weights %d: %s", self._region, event.policy_version, cause
            )
        return bool(cause)


def _conflict(held: WeightsPublished, event: WeightsPublished) -> str:
    """Say why `event` cannot follow `held`; empty where it can."""
    if held.policy_version >= event.policy_version:
        return ""
    if held.fencing_token > event.fencing_token:
        return f"its fencing token is {event.fencing_token}, after {held.fencing_token}"
    is_base = held.policy_version == event.base_version
    if is_base and held.target_root_digest != event.base_root_digest:
        return f"its base is {event.base_root_digest}, not {held.target_root_digest}"
    return ""
