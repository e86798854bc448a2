"""The trainer's side: the real ranks, verifiers and committer, over small arrays."""

import asyncio

from tests.lab.regions.shaping import Bandwidth
from tests.lab.simulate.weights.settings import GBIT, Scenario
from tests.lab.simulate.weights.sized_store import Site, SizedStore
from tests.lab.simulate.weights.sizes import Sizes
from tests.lab.simulate.weights.stand_in import SizedDecoder, SizedEncoder, StandIn, in_place

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.rank_attempt import VERSION_S_MAX
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.messages import codec
from penstock.messages.bus import Bus


class RankedTrainer:
    """Publishes a version per step, by all ranks; only arrays and their coding are modeled."""

    def __init__(self, scenario: Scenario, origin: Site, bus: Bus) -> None:
        self._scenario = scenario
        self._origin = origin
        self._bus = bus
        self._model = StandIn(scenario.num_ranks, scenario.ranks_per_verifier, scenario.seed)
        self._sizes = Sizes(
            scenario.model_bytes, scenario.num_ranks, scenario.learning_rate, scenario.seed
        )
        self._now: list[int] = []
        """Sizes of the current version, by rank."""
        self._ranks = [self._rank(rank) for rank in range(scenario.num_ranks)]
        self._verifiers = [self._verifier(number) for number in range(len(self._model.spans))]
        self._committer = Committer(
            self._store(), scenario.num_ranks, self._model.table, self._model.spans
        )
        self.began_s: list[float] = []
        """When each version's weights were ready, by version."""
        self.published_s: list[float] = []
        """Seconds from then to its event, by version."""
        self.num_bytes: list[int] = []
        """Bytes uploaded, by version."""
        self.manifest_bytes_max = 0

    async def run(self) -> None:
        """Take all steps."""
        now_s = asyncio.get_running_loop().time
        for version in range(1, self._scenario.num_steps + 1):
            await self.publish(version)
            await asyncio.sleep(max(0.0, self.began_s[-1] + self._scenario.step_s - now_s()))

    async def publish(self, version: int) -> None:
        """Publish one version; 0 is whole."""
        now_s = asyncio.get_running_loop().time
        self.began_s.append(now_s())
        self._now = self._sizes.delta(version) if version else self._sizes.full()
        self.num_bytes.append(sum(self._now))
        parts = self._model.step()
        token = await self._committer.begin()
        async with asyncio.TaskGroup() as group:
            for rank, part in zip(self._ranks, parts, strict=True):
                group.create_task(rank.upload(version, token, [part]))
            for verifier in self._verifiers:
                group.create_task(verifier.verify(version, token, wait_s=VERSION_S_MAX))
            commit = group.create_task(
                self._committer.commit(version, optimizer_step=version, wait_s=VERSION_S_MAX)
            )
        manifest = commit.result()
        await self._bus.publish([manifest])
        self.published_s.append(now_s() - self.began_s[-1])
        self.manifest_bytes_max = max(self.manifest_bytes_max, len(codec.encode(manifest)))

    def _rank(self, rank: int) -> RankPublisher:
        encoder = SizedEncoder(self._scenario, lambda: self._now[rank])
        layout = self._model.layout(rank)
        return RankPublisher(self._store(), rank, self._model.table, layout, encode=encoder.encode)

    def _verifier(self, number: int) -> SpanVerifier:
        decoder = SizedDecoder(self._scenario)
        span = self._model.spans[number]
        return SpanVerifier(self._store(), number, span, decoder=decoder)

    def _store(self) -> StoreIO:
        """Return the origin over a link of its own."""
        link = Bandwidth(self._scenario.rank_gbit_s * GBIT)
        round_trip_s = self._scenario.origin_round_trip_s
        store = SizedStore(self._origin, (link,), round_trip_s=round_trip_s)
        return StoreIO(store, offload=in_place)
