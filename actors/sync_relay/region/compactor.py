"""Where the origin does not keep every version for ever: folds, anchors and collects it.

A region's relay does this for its region. The origin needs one of its own, near that store, so that
a region joined late finds anchors and folds there, and the trainer uploads deltas alone.
"""

import logging
from typing import ClassVar

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.core.head import read_head
from penstock.actors.sync_relay.region.consolidation import Consolidation
from penstock.actors.sync_relay.region.retention import FOLD_EVERY
from penstock.messages.base import Event
from penstock.messages.errors import StoreFullError
from penstock.messages.weights import WeightsPublished

_log = logging.getLogger(__name__)


class Keeper(Actor):
    """Follows the publisher; looks after `ctx.store`, one per run."""

    role: ClassVar[str] = "keeper"
    follows: ClassVar[tuple[type[Event], ...]] = (WeightsPublished,)

    def __init__(self, num_versions_kept: int) -> None:
        """Args: `num_versions_kept` newest versions stay, whatever the anchors.

        A trainer that starts from its oldest checkpoint publishes again what is there since, and
        trajectories that are not trained yet name versions of the last few.
        """
        self._num_versions_kept = num_versions_kept
        self._newest = NOTHING
        self._catalog: Catalog
        self._consolidation: Consolidation

    async def start(self, ctx: Context) -> Effects:
        """Look at what the origin holds."""
        self._catalog = Catalog(ctx.store)
        self._consolidation = Consolidation(ctx.store, self._catalog)
        return ()

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Fold, anchor and collect where it is time.

        Raises:
            DamagedStoreError: the origin's objects are damaged or gone.
            CorruptDataError: its head is damaged.

        """
        if event.policy_version <= self._newest or event.policy_version % FOLD_EVERY:
            return ()
        head = await read_head(ctx.store)
        await self._catalog.refresh()
        self._catalog.keep_history([head.node])
        way = self._catalog.plan(NOTHING)
        self._newest = way[-1].policy_version if way else NOTHING
        needed = [max(0, self._newest - self._num_versions_kept)]
        try:
            await self._consolidation.advance(self._newest, ctx, needed=needed)
        except StoreFullError as error:
            _log.warning("keeper: no room for folds and anchors: %s", error)
        return ()
