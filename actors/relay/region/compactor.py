"""Compacts an origin store that does not keep every version forever.

A relay does this for the store of its region. The origin needs a separate compactor close to its
store: a region that joins late finds full snapshots and merged deltas there, although the trainer
uploads only deltas.
"""

import logging
from collections.abc import Collection
from typing import ClassVar

from penstock.actors.relay.core.catalog import NOTHING, Catalog
from penstock.actors.relay.core.version_head import read_head
from penstock.actors.relay.region.consolidation import (
    ConsolidatingActor,
    Consolidation,
    MakeBuilder,
    Merger,
)
from penstock.actors.relay.region.retention import MERGE_EVERY
from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)


class Compactor(ConsolidatingActor):
    """Follows the publisher and consolidates the origin store, `ctx.store`; one per run."""

    role: ClassVar[str] = "compactor"

    def __init__(
        self,
        num_versions_kept: int,
        *,
        pinned: Collection[int] = (),
        make_builder: MakeBuilder = Merger,
    ) -> None:
        """Initialize without reading anything.

        Args:
            num_versions_kept: Number of newest versions to keep in any case: a trainer that resumes
                from its oldest checkpoint publishes the versions since then again, and untrained
                trajectories refer to the last few versions.
            pinned: Versions that replicas hold permanently.
            make_builder: Function that creates the builder of updates; simulations replace it.

        """
        super().__init__(pinned)
        self._num_versions_kept = num_versions_kept
        self._make_builder = make_builder
        self._newest = NOTHING
        self._catalog: Catalog

    async def start(self, ctx: Context) -> Effects:
        """Start with an empty catalog."""
        self._catalog = Catalog(ctx.store)
        self._consolidation = Consolidation(ctx.store, self._catalog, self._make_builder)
        return ()

    async def on_weights_published(self, event: WeightsPublished, ctx: Context) -> Effects:
        """Consolidate the origin every `MERGE_EVERY` versions.

        Raises:
            DamagedStoreError: Objects of the origin are damaged or missing.
            CorruptDataError: The origin's head is damaged.

        """
        # Nothing can become due in between, and events may arrive twice.
        if event.policy_version <= self._newest or event.policy_version % MERGE_EVERY:
            return ()
        head = await read_head(ctx.store)
        await self._catalog.refresh()
        # Manifests that were never committed must not become the base of a merged delta.
        self._catalog.keep_history([head.node])
        path = self._catalog.plan(NOTHING)
        self._newest = path[-1].policy_version if path else NOTHING
        oldest = max(0, self._newest - self._num_versions_kept)
        log.info("consolidating the origin at version %d, keeping from %d", self._newest, oldest)
        await self._consolidate(self._newest, [oldest], ctx)
        return ()
