"""Trainer ranks, in processes of their own or beside each other, and their committer."""

import asyncio
import subprocess
import sys
from itertools import pairwise

from tests.sim.sync.rank_process import TABLE, boxes, weights
from tests.sim.sync.runs import find_runs
from tests.sim.sync.world import FakeContext

from penstock.actors.relay.core.catalog import Catalog
from penstock.actors.relay.core.flat_snapshot import SHARD_ELEMENTS_MAX, FlatSnapshot, cut
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.rank_committer import Committer
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.actors.relay.publish.spans import cut_spans
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.actors.relay.replica.weight_replica import WeightReplica
from penstock.messages.weights import Extent

NUM_RANKS = 3


NUM_VERIFIERS = 2


class Rank:
    """A rank's process."""

    def __init__(self, folder, rank):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.sim.sync.rank_process", str(folder), str(rank),
             str(NUM_RANKS)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
        )  # fmt: skip

    def say(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self):
        return self._process.stdout.readline().strip()

    def kill(self):
        """kill -9."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def upload(ranks, version, token):
    for rank in ranks:
        rank.say(f"upload {version} {token}")
    assert [rank.hear() for rank in ranks] == [f"uploaded {version}"] * len(ranks)


async def no_sleep(duration_s):
    """Take no time."""


class Trainer:
    """A committer, and the verifiers that work for it."""

    def __init__(self, store, num_ranks=NUM_RANKS, table=TABLE, num_verifiers=NUM_VERIFIERS):
        spans = cut_spans(table, num_verifiers)
        self.committer = Committer(StoreIO(store), num_ranks, table, spans)
        self.verifiers = [
            SpanVerifier(StoreIO(store), number, span) for number, span in enumerate(spans)
        ]
        self.begin = self.committer.begin

    async def commit(self, version, wait_s=5.0):
        """Let the verifiers verify until the commit ends, one way or the other."""
        token = await self.begin()
        verifications = [
            asyncio.create_task(verifier.verify(version, token, wait_s=wait_s))
            for verifier in self.verifiers
        ]
        try:
            return await self.committer.commit(version, optimizer_step=version, wait_s=wait_s)
        finally:
            for verification in verifications:
                verification.cancel()
            await asyncio.gather(*verifications, return_exceptions=True)


async def snapshot_of(store, version):
    catalog = Catalog(store)
    await catalog.refresh()
    replica = WeightReplica(store, catalog)
    await replica.advance(version, FakeContext(store))
    return replica.snapshot


def local_ranks(store, layouts, table=TABLE):
    return [
        RankPublisher(StoreIO(store, no_sleep), number, table, layout)
        for number, layout in enumerate(layouts)
    ]


def layouts(num_ranks=NUM_RANKS):
    return [
        [find_runs(TABLE, name, box) for name, box in boxes(rank, num_ranks)]
        for rank in range(num_ranks)
    ]


def assign_shards(table, num_ranks, spans, num_elements_max=SHARD_ELEMENTS_MAX):
    """Return the layouts of ranks that hold equal parts of the flat coordinates."""
    total = sum(spec.size for spec in table)
    starts = [total * rank // num_ranks for rank in range(num_ranks)]
    # Cut wherever a rank, a span, a dtype or a maximal shard begins.
    places = {*starts, *(span.start for span in spans), total}
    places |= {run.start for run in cut(table, num_elements_max)}
    bounds = sorted(places)
    held = [[] for _ in range(num_ranks)]
    rank = 0
    for begin, end in pairwise(bounds):
        while rank + 1 < num_ranks and starts[rank + 1] <= begin:
            rank += 1
        held[rank].append([Extent(begin, end - begin)])
    return held


async def upload_all(publishers, version, token, tensors=None):
    flat = FlatSnapshot.of(weights(version) if tensors is None else tensors)
    for publisher in publishers:
        parts = [flat.part(runs) for runs in publisher._layout]
        await publisher.upload(version, token, parts)
