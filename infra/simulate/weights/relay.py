"""The relay and the origin's keeper themselves; only what they would code is modeled."""

from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.core.catalog import Catalog, num_bytes
from penstock.actors.sync_relay.core.transfer import put_manifest, put_object
from penstock.actors.sync_relay.region.compactor import Keeper
from penstock.actors.sync_relay.region.consolidation import Consolidation
from penstock.actors.sync_relay.region.relay import Relay
from penstock.actors.sync_relay.region.retention import Piece
from penstock.infra.simulate.weights.settings import GB, Scenario
from penstock.infra.simulate.weights.sizes import Sizes
from penstock.infra.simulate.weights.versions import make_version
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import SnapshotKind, WeightsPublished


class SizedConsolidation(Consolidation):
    """The relay's own, but for the coding: a fold is its size, and takes its time."""

    def __init__(self, local: ObjectStore, catalog: Catalog, scenario: Scenario) -> None:
        super().__init__(local, catalog)
        self._scenario = scenario
        self._sizes = Sizes(scenario.model_bytes, scenario.num_ranks, scenario.learning_rate, 0)

    async def _make(self, pieces: list[Piece], ctx: Context) -> None:
        for piece in pieces:
            scenario = self._scenario
            await ctx.sleep(scenario.model_bytes / (scenario.relay_gb_s * GB))
            sizes = self._sizes.anchor()
            if piece.kind is SnapshotKind.FOLD:
                sizes = self._sizes.fold([num_bytes(m) for m in self._deltas(piece)])
            manifest, objects = make_version(
                piece, sizes, full_bytes=scenario.model_bytes, fencing_token=1
            )
            for key, data in objects.items():
                await put_object(self._local, key, data, ctx.sleep)
            await put_manifest(self._local, manifest, ctx.sleep)
            self._catalog.add(manifest)

    def _deltas(self, piece: Piece) -> list[WeightsPublished]:
        """Return what a fold folds."""
        span = range(piece.base_version + 1, piece.policy_version + 1)
        return [
            manifest
            for manifest in self._catalog.manifests
            if manifest.kind is SnapshotKind.DELTA and manifest.policy_version in span
        ]


class SizedRelay(Relay):
    """The relay itself, with the consolidation that codes nothing."""

    def __init__(self, region: str, local: ObjectStore, scenario: Scenario) -> None:
        super().__init__(region, local)
        self._consolidation = SizedConsolidation(local, self._catalog, scenario)


class SizedKeeper(Keeper):
    """The keeper itself, likewise."""

    def __init__(self, num_versions_kept: int, scenario: Scenario) -> None:
        super().__init__(num_versions_kept)
        self._scenario = scenario

    async def start(self, ctx: Context) -> Effects:
        """Look at what the origin holds."""
        self._catalog = Catalog(ctx.store)
        self._consolidation = SizedConsolidation(ctx.store, self._catalog, self._scenario)
        return ()
