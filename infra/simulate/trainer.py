"""The trainer's side: a version a step, each rank its own object."""

import asyncio

from penstock.actors.sync_relay.catalog import NOTHING
from penstock.actors.sync_relay.head import FencedHead
from penstock.actors.sync_relay.retention import Piece
from penstock.actors.sync_relay.transfer import put_manifest, put_object
from penstock.infra.simulate.settings import GB, GBIT, Scenario
from penstock.infra.simulate.sized_store import Site, SizedStore
from penstock.infra.simulate.sizes import Sizes
from penstock.infra.simulate.versions import make_version
from penstock.infra.simulate.wires import Wire
from penstock.messages.bus import Bus
from penstock.messages.weights import SnapshotKind


class SizedTrainer:
    """Publishes as the publisher does: objects, manifest, head, event; arrays are left out."""

    def __init__(self, scenario: Scenario, origin: Site, bus: Bus) -> None:
        self._scenario = scenario
        self._bus = bus
        self._wires = [Wire(scenario.rank_gbit_s * GBIT) for _ in range(scenario.num_ranks)]
        self._ranks = [SizedStore(origin, (wire,)) for wire in self._wires]
        self._origin = SizedStore(origin)
        self._head = FencedHead(self._origin, asyncio.sleep)
        self._sizes = Sizes(
            scenario.model_bytes, scenario.num_ranks, scenario.learning_rate, scenario.seed
        )
        self.began_s: list[float] = []
        """When each version's weights were ready, by version."""
        self.num_bytes: list[int] = []
        """Uploaded for each version."""

    async def run(self) -> None:
        """Take all steps."""
        now_s = asyncio.get_running_loop().time
        for version in range(1, self._scenario.num_steps + 1):
            await self.publish(version)
            await asyncio.sleep(max(0.0, self.began_s[-1] + self._scenario.step_s - now_s()))

    async def publish(self, version: int) -> None:
        """Publish one version; 0 is whole."""
        self.began_s.append(asyncio.get_running_loop().time())
        await self._head.hold()
        kind = SnapshotKind.DELTA if version else SnapshotKind.ANCHOR
        sizes = self._sizes.delta(version) if version else self._sizes.anchor()
        base_version = version - 1 if version else NOTHING
        manifest, objects = make_version(
            Piece(version, kind, base_version),
            sizes,
            full_bytes=self._scenario.model_bytes,
            fencing_token=self._head.token,
        )
        self.num_bytes.append(sum(sizes))
        parts = zip(self._ranks, objects.items(), strict=True)
        await asyncio.gather(*(self._upload(rank, key, data) for rank, (key, data) in parts))
        await put_manifest(self._origin, manifest, asyncio.sleep)
        await self._head.advance(manifest)
        await self._bus.publish([manifest])

    async def _upload(self, rank: SizedStore, key: str, data: bytes) -> None:
        scenario = self._scenario
        await asyncio.sleep(scenario.model_bytes / scenario.num_ranks / (scenario.encode_gb_s * GB))
        await put_object(rank, key, data, asyncio.sleep)
