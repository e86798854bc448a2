"""Publishing ranks as a run has them: actors that a trainer's publisher asks."""

import asyncio

import msgspec
import numpy as np
import pytest
from tests.e2e.launched import TINY
from tests.sim.sync.rank_process import weights
from tests.sim.sync.world import FakeContext

from penstock.actors.relay.core.config import RelayConfig
from penstock.actors.relay.core.flat_snapshot import FlatSnapshot, tensor_table
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish import multi_rank_publisher, rank_actor
from penstock.actors.relay.publish.handover import Handover
from penstock.actors.relay.publish.history import read_back
from penstock.actors.relay.publish.multi_rank_publisher import MultiRankPublisher, RankUploads
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.publish.rank_actor import RankActor, upload_service
from penstock.actors.relay.publish.spans import assign_shards, cut_spans
from penstock.infra.config.file import parse_config, read_toml
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest
from penstock.messages.errors import ConfigError, DeadlineError, NotFoundError, RemoteCallError
from penstock.messages.rpc import Ack, RemoteError
from penstock.messages.weights import UploadWeights

NUM_RANKS = 2


class Ranks:
    """The actors, behind what stands for the bus."""

    def __init__(self, store, folder):
        self.folder = folder
        self.store = store
        self.actors = {}
        self.num_asked = 0
        self.num_deaf = 0

    async def start(self, rank):
        actor = RankActor(rank, NUM_RANKS, self.folder / "handover")
        await actor.start(FakeContext(self.store))
        self.actors |= actor.services()

    async def ask(self, service, message, *, idle_s):
        self.num_asked += 1
        if self.num_deaf:
            self.num_deaf -= 1
            raise DeadlineError(f"{service}: no reply")
        async for reply in self.actors[service](message):
            if isinstance(reply, RemoteError):
                raise RemoteCallError(reply.kind, reply.error)
            yield reply


@pytest.fixture
async def ranks(tmp_path):
    made = Ranks(MemoryStore(), tmp_path)
    for rank in range(NUM_RANKS):
        await made.start(rank)
    return made


def publisher(ranks):
    uploads = RankUploads(ranks.store, NUM_RANKS, ranks.ask, upload_service)
    return MultiRankPublisher(uploads, ranks.folder / "handover")


async def prepare(target, version, tensors=None):
    tensors = weights(version) if tensors is None else tensors
    return await target.prepare(version, tensors, optimizer_step=version, config_json="{}")


async def test_ranks_publish_the_digests_that_one_process_publishes(ranks):
    many, one = publisher(ranks), Publisher(StoreIO(MemoryStore()))
    for version in range(4):
        manifest, plain = await prepare(many, version), await prepare(one, version)
        assert manifest.target_root_digest == plain.target_root_digest
        assert manifest.target_element_digest == plain.target_element_digest
        assert manifest.num_changed == plain.num_changed
        assert manifest.config_json == plain.config_json
    assert await prepare(many, 3) == manifest
    flat, _ = await read_back(StoreIO(ranks.store, asyncio.sleep, asyncio.to_thread), 3)
    assert root_digest(flat.tensors) == root_digest(weights(3))


async def test_a_rank_that_is_away_is_asked_again_and_a_restarted_one_goes_on(ranks):
    target = publisher(ranks)
    await prepare(target, 0)
    ranks.num_deaf = 3
    await ranks.start(1)
    manifest = await prepare(target, 1)
    assert manifest.target_root_digest == root_digest(weights(1))
    assert ranks.num_asked == 2 * NUM_RANKS + 3


async def test_a_restarted_trainer_publishes_a_version_again_and_the_next(ranks):
    first = publisher(ranks)
    for version in range(3):
        manifest = await prepare(first, version)
    again = publisher(ranks)
    assert await prepare(again, 2) == manifest
    assert (await prepare(again, 3)).fencing_token == 2


async def test_a_new_attempt_ends_the_old_one_and_an_old_one_asked_again_does_nothing_twice(
    ranks, monkeypatch
):
    monkeypatch.setattr(rank_actor, "_BEAT_S", 0.01)
    serve = ranks.actors["upload.0"]
    Handover(ranks.folder / "handover", 1, tensor_table(weights(0))).write(weights(0))

    def upload(attempt):
        table = msgspec.msgpack.encode(tensor_table(weights(0)))
        return UploadWeights(policy_version=0, fencing_token=1, attempt=attempt, tensor_table=table)

    old = serve(upload("a"))
    assert [await anext(old), await anext(serve(upload("a")))] == [Ack(), Ack()]
    new = serve(upload("b"))
    assert await anext(new) == Ack()
    with pytest.raises(RemoteCallError, match="a newer attempt took over"):
        async for reply in old:
            if isinstance(reply, RemoteError):
                raise RemoteCallError(reply.kind, reply.error)
    await ranks.actors["upload.0"].__self__.stop(None)


async def test_a_rank_that_fails_ends_the_commit_with_its_words(ranks):
    target = publisher(ranks)
    with pytest.raises(NotFoundError, match="weights 4: not committed"):
        await prepare(target, 5)


async def test_a_rank_that_never_answers_is_given_up(ranks, monkeypatch):
    monkeypatch.setattr(multi_rank_publisher, "_NUM_REQUESTS_MAX", 2)
    ranks.num_deaf = 10**6
    with pytest.raises(DeadlineError, match=r"upload\.\d: no reply"):
        await prepare(publisher(ranks), 0)


def test_a_handed_over_snapshot_is_read_in_any_layout(tmp_path):
    tensors = weights(2) | {"odd": np.arange(5, dtype=np.uint8), "void": np.zeros((0, 3), "<u4")}
    table = tensor_table(tensors)
    room = Handover(tmp_path, 1, table)
    room.write(weights(1) | {"odd": tensors["odd"], "void": tensors["void"]})
    room.write(tensors)
    flat = FlatSnapshot.of(tensors)
    for layout in assign_shards(table, 3, cut_spans(table, 2), 50):
        parts = room.read(layout)
        for runs, part in zip(layout, parts, strict=True):
            assert np.array_equal(part, flat.part(runs))
    other = Handover(tmp_path, 1, tensor_table({"a": np.zeros(3, np.uint8)}))
    with pytest.raises(ValueError, match="expected 3 bytes"):
        other.read([])


def test_a_run_has_a_process_for_each_rank_if_there_are_several():
    data = read_toml(TINY)
    assert "publisher-0" not in parse_config(read_toml(TINY), "tiny").processes
    config = parse_config(data | {"weights": {"num_publisher_ranks": 3}}, "tiny")
    assert [config.processes[f"publisher-{n}"] for n in range(3)] == [
        [f"publisher:{n}"] for n in range(3)
    ]
    for wrong in (0, -1, 65):
        with pytest.raises(ConfigError, match=r"(>= 1|<= 64) .*num_publisher_ranks"):
            parse_config(read_toml(TINY) | {"weights": {"num_publisher_ranks": wrong}}, "tiny")
    for wrong in (3, {"num_publisher_ranks": 2.0}, {"num_publisher_ranks": "2"}):
        with pytest.raises(ConfigError, match=r"Expected `(object|int)`"):
            parse_config(read_toml(TINY) | {"weights": wrong}, "tiny")
    assert RelayConfig().num_publisher_ranks == 1


@pytest.mark.parametrize(
    ("num_ranks", "specs"), [(2, ["publisher:0"]), (1, ["publisher:0"]), (2, ["publisher:2"])]
)
def test_each_rank_has_one_process_and_no_other_is_one(num_ranks, specs):
    data = read_toml(TINY) | {"weights": {"num_publisher_ranks": num_ranks}}
    data["processes"]["own"] = specs
    with pytest.raises(ConfigError, match=r"processes: expected .*publisher.*, got \[.*publisher:"):
        parse_config(data, "tiny")
