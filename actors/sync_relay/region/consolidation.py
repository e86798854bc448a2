"""Folds and anchors made where a store is, and the deletion of what they make needless.

A late joiner takes an anchor, the folds and the deltas after it; the trainer uploads nothing for
that. `retention.py` says what is made and what is kept; here it is done.
"""

import logging
from collections.abc import Collection

from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.catalog import Catalog
from penstock.actors.sync_relay.core.flat_snapshot import Image, cut
from penstock.actors.sync_relay.core.leases import leased_versions
from penstock.actors.sync_relay.core.objects import PREFIX, Origin, is_manifest
from penstock.actors.sync_relay.publish.shipping import store_version
from penstock.actors.sync_relay.region.retention import (
    FOLD_EVERY,
    Piece,
    due,
    floor,
    is_kept,
    piece_of,
)
from penstock.actors.sync_relay.replica.weight_replica import Mirror
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import SnapshotKind, WeightsPublished

_log = logging.getLogger(__name__)


class Consolidation:
    """Keeps one store short and self-sufficient; holds one image in memory, two while it folds."""

    def __init__(self, local: ObjectStore, catalog: Catalog) -> None:
        self._local = local
        self._catalog = catalog
        self._mirror = Mirror(local, catalog)

    async def advance(self, newest: int, ctx: Context, *, needed: Collection[int] = ()) -> None:
        """Make what is due up to the newest version, then delete what nobody needs.

        Args:
            newest: the newest version that the store holds.
            ctx: the actor's context.
            needed: versions to keep beside the leased ones.

        Raises:
            OSError: no room, after several attempts.
            DamagedStoreError: a version that nothing undamaged leads to.

        """
        pieces = due(self._catalog.manifests, newest)
        for version in sorted({piece.policy_version for piece in pieces}):
            await self._make([p for p in pieces if p.policy_version == version], ctx)
        if pieces:
            await self.collect(ctx, needed=needed)

    async def rebuild(self, version: int, ctx: Context) -> Image:
        """Return the image of any version that the store leads to.

        Raises:
            NotFoundError: it leads there no more.

        """
        mirror = Mirror(self._local, self._catalog)
        await mirror.advance(version, ctx)
        return mirror.image

    async def _make(self, pieces: list[Piece], ctx: Context) -> None:
        """Make the pieces of one version: the short fold from the image at hand, then the rest."""
        version = pieces[0].policy_version
        short = [p for p in pieces if p.base_version == version - FOLD_EVERY]
        base: tuple[Image, WeightsPublished] | None = None
        if short:
            await self._mirror.advance(version - FOLD_EVERY, ctx)
            base = self._mirror.image.copy(), self._mirror.manifest
        await self._mirror.advance(version, ctx)
        self._mirror.settle()
        for piece in pieces:
            if piece.kind is SnapshotKind.ANCHOR:
                base = None
            elif piece not in short:
                older = Mirror(self._local, self._catalog)
                await older.advance(piece.base_version, ctx)
                base = older.image, older.manifest
            await self._put(piece, base, ctx)

    async def _put(
        self, piece: Piece, base: tuple[Image, WeightsPublished] | None, ctx: Context
    ) -> None:
        manifest, image = self._mirror.manifest, self._mirror.image
        origin = Origin(
            policy_version=piece.policy_version,
            base_version=piece.base_version,
            kind=piece.kind,
            optimizer_step=manifest.optimizer_step,
            fencing_token=manifest.fencing_token,
            base_root_digest=base[1].target_root_digest if base else "",
            base_element_digest=base[1].target_element_digest if base else "",
        )
        old = base[0] if base else None
        extents = cut(image.table)
        made = await store_version(self._local, origin, old, image, extents, ctx.sleep, ctx.offload)
        self._catalog.add(made)

    async def collect(self, ctx: Context, *, needed: Collection[int] = ()) -> None:
        """Delete by key, manifests first, so that what a failed put left behind goes too."""
        leased = await leased_versions(self._local, ctx.now())
        oldest = floor(self._catalog.manifests, {*leased, *needed})
        if oldest <= 0:
            return
        keys = [key for key in await self._local.keys(PREFIX) if _is_old(key, oldest)]
        for key in sorted(keys, key=lambda key: not is_manifest(key)):
            await self._local.delete(key)
        for manifest in self._catalog.manifests:
            if not is_kept(piece_of(manifest), oldest):
                self._catalog.discard(manifest)
        _log.info("weights: deleted %d objects from before version %d", len(keys), oldest)


def _is_old(key: str, oldest: int) -> bool:
    version, _, rest = key.removeprefix(PREFIX).partition("/")
    if not version.isdigit():  # the head
        return False
    kind, _, base = rest.partition("/")[0].partition("-")
    if kind not in SnapshotKind.__members__.values():
        return False
    base_version = int(base) if base else int(version) - 1
    return not is_kept(Piece(int(version), SnapshotKind(kind), base_version), oldest)
