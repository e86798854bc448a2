"""Merged deltas and full snapshots as sizes alone; making one takes the time of the real coding."""

from collections.abc import Mapping, Sequence

from blake3 import blake3
from tests.lab.simulate.weights.settings import GB, Scenario
from tests.lab.simulate.weights.sized_store import SizedBytes
from tests.lab.simulate.weights.sizes import Sizes

from penstock.actors.relay.core.catalog import Catalog, num_bytes
from penstock.actors.relay.core.objects import folder_key
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.region.retention import UpdateEdge
from penstock.actors.runtime.context import Context
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import ShardRef, SnapshotKind, WeightsPublished


class SizedMerger:
    """An `UpdateBuilder` of a relay or of the compactor."""

    def __init__(self, scenario: Scenario, local: ObjectStore, catalog: Catalog) -> None:
        self._scenario = scenario
        self._local = local
        self._catalog = catalog
        self._sizes = Sizes(scenario.model_bytes, scenario.num_ranks, scenario.learning_rate, 0)

    async def make(self, edges: Sequence[UpdateEdge], ctx: Context) -> None:
        """Store the sizes of updates; see `UpdateBuilder.make`."""
        scenario, io = self._scenario, StoreIO(self._local, ctx.sleep)
        for edge in edges:
            await ctx.sleep(scenario.model_bytes / (scenario.relay_gb_s * GB))
            sizes = self._sizes.full()
            if edge.kind is SnapshotKind.MERGED:
                sizes = self._sizes.merged([num_bytes(m) for m in self._deltas(edge)])
            manifest, objects = make_version(
                edge, sizes, full_bytes=scenario.model_bytes, fencing_token=1
            )
            for key, data in objects.items():
                await io.put(key, data)
            await io.put_manifest(manifest)
            self._catalog.add(manifest)

    def _deltas(self, edge: UpdateEdge) -> list[WeightsPublished]:
        """Return the deltas that are merged."""
        span = range(edge.base_version + 1, edge.policy_version + 1)
        return [
            manifest
            for manifest in self._catalog.manifests
            if manifest.kind is SnapshotKind.DELTA and manifest.policy_version in span
        ]


def make_version(
    edge: UpdateEdge, sizes: Sequence[int], *, full_bytes: int, fencing_token: int
) -> tuple[WeightsPublished, Mapping[str, bytes]]:
    """Return the manifest and the objects, by key, of one version.

    Args:
        edge: version, kind and base.
        sizes: of its objects, in bytes.
        full_bytes: of the whole snapshot.
        fencing_token: of its publisher.

    """
    folder = folder_key(edge.policy_version, edge.kind, edge.base_version)
    objects: dict[str, bytes] = {}
    shards: list[ShardRef] = []
    for number, size in enumerate(sizes):
        content = f"{folder}{number}".encode()
        check = blake3(content).hexdigest()
        key = f"{folder}{number}-{check[:16]}"
        objects[key] = SizedBytes(content, size)
        shards.append(
            ShardRef(shard_id=number, object_key=key, num_bytes=size, blake3=check, codec="sized")
        )
    manifest = WeightsPublished(
        policy_version=edge.policy_version,
        base_version=edge.base_version,
        kind=edge.kind,
        optimizer_step=edge.policy_version,
        fencing_token=fencing_token,
        representation="bf16",
        base_root_digest=_digest(edge.base_version),
        target_root_digest=_digest(edge.policy_version),
        num_params=full_bytes // 2,
        num_changed=0,
        full_bytes=full_bytes,
        shards=shards,
    )
    return manifest, objects


def _digest(version: int) -> str:
    return f"{version:032x}" if version >= 0 else ""
