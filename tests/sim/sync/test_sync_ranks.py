"""Trainer ranks as processes of their own: one store, one manifest, one fenced commit."""

import asyncio
import itertools

import numpy as np
import pytest
from tests.sim.sync.rank_process import TABLE, weights
from tests.sim.sync.ranks import (
    NUM_RANKS,
    Rank,
    Trainer,
    assign_shards,
    layouts,
    local_ranks,
    no_sleep,
    snapshot_of,
    upload,
    upload_all,
)
from tests.sim.sync.runs import find_runs
from tests.sim.sync.world import FakeContext, FakeEngine, manifest_in

from penstock.actors.relay.core import store_io
from penstock.actors.relay.core.digests import add_to_digest
from penstock.actors.relay.core.flat_snapshot import cut
from penstock.actors.relay.core.store_io import DamagedStoreError, StoreIO
from penstock.actors.relay.core.version_head import StaleTokenError, read_head
from penstock.actors.relay.publish.history import read_back
from penstock.actors.relay.publish.rank_attempt import attempt_prefix
from penstock.actors.relay.publish.rank_publisher import RankPublisher
from penstock.actors.relay.publish.spans import cut_spans
from penstock.actors.relay.region.relay import Relay
from penstock.actors.relay.replica.receiver import Receiver
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest, run_element_sum
from penstock.kernels.element_types import TensorSpec
from penstock.messages.errors import CorruptDataError, DeadlineError, NotFoundError
from penstock.messages.retries import RetryPolicy
from penstock.messages.weights import Extent, SnapshotKind, WeightsRelayed


@pytest.fixture
def ranks(tmp_path):
    running = [Rank(tmp_path, rank) for rank in range(NUM_RANKS)]
    yield running
    for rank in running:
        rank.kill()


async def test_ranks_upload_apart_and_receivers_end_bit_exact(tmp_path, ranks):
    """Ranks hold columns, the receiver whole tensors in another cut; then a rank is killed."""
    store = DirectoryStore(tmp_path)
    trainer = Trainer(store)
    token = await trainer.begin()
    for version in range(2):
        upload(ranks, version, token)
        manifest = await trainer.commit(version)
        target = weights(version)
        assert manifest.kind is (SnapshotKind.DELTA if version else SnapshotKind.FULL)
        assert manifest.target_root_digest == root_digest(target)
        flat = await snapshot_of(store, version)
        assert all(np.array_equal(flat.tensors[name], target[name]) for name in target)
        sums = (run_element_sum(run.start, flat.part([run])) for run in cut(TABLE, 97))
        assert manifest.target_element_digest == add_to_digest("", sum(sums))
    assert len([shard for shard in manifest.shards if shard.codec != "table"]) == 3 * NUM_RANKS
    assert not [key for key in await store.keys("weights/") if "attempt" in key]

    ranks[1].say("stall 2")
    for rank in ranks:
        rank.say(f"upload 2 {token}")
    assert [rank.hear() for rank in ranks] == ["uploaded 2", "stalled", "uploaded 2"]
    ranks[1].kill()
    with pytest.raises(DeadlineError, match=r"1 of 3 ranks of weights 2 left no marker .*\[1\]"):
        await trainer.commit(2, wait_s=0.2)
    assert (await read_head(store)).policy_version == 1
    assert not await store.keys("weights/00000002/delta/manifest")

    ranks[1] = Rank(tmp_path, 1)
    upload(ranks[1:2], 2, token)
    manifest = await trainer.commit(2)
    assert manifest.num_changed == sum(
        np.count_nonzero(new != old)
        for new, old in zip(weights(2).values(), weights(1).values(), strict=True)
    )
    assert (await read_head(store)).root_digest == root_digest(weights(2))
    flat = await snapshot_of(store, 2)
    assert root_digest(flat.tensors) == root_digest(weights(2))


async def test_relays_and_receivers_take_what_ranks_published_as_anything_else():
    origin, local, engine = MemoryStore(), MemoryStore(), FakeEngine()
    context = FakeContext(origin)
    relay = Relay("west", local)
    await relay.start(context)
    receiver = Receiver("west", "0", local, engine)
    trainer = Trainer(origin)
    token = await trainer.begin()
    publishers = local_ranks(origin, layouts())
    for version in range(10):
        await upload_all(publishers, version, token)
        manifest = await trainer.commit(version)
        await relay.on_weights_published(manifest, context)
        event = WeightsRelayed(region="west", policy_version=version, num_bytes=0, fetch_ms=0.0)
        await receiver.on_weights_relayed(event, context)
        assert root_digest(engine.live) == root_digest(weights(version))
    assert await manifest_in(local, "00000008/merged-00000000")


async def test_an_attempt_under_an_old_token_is_not_mixed_into_a_new_one():
    """All ranks upload; before the commit another committer takes over, with other weights."""
    store = MemoryStore()
    first, second = (Trainer(store) for _ in range(2))
    publishers = local_ranks(store, layouts())
    token = await first.begin()
    await upload_all(publishers, 0, token)
    await first.commit(0)
    await upload_all(publishers, 1, token)
    newer = await second.begin()
    assert newer == token + 1
    with pytest.raises(DeadlineError, match="3 of 3 ranks"):
        await second.commit(1, wait_s=0.0)
    with pytest.raises(StaleTokenError, match=f"token {token}, the head's is {newer}"):
        await upload_all(publishers, 1, token)
    with pytest.raises(StaleTokenError):
        await first.commit(1)
    await upload_all(publishers, 1, newer, weights(3))
    manifest = await second.commit(1)
    assert manifest.target_root_digest == root_digest(weights(3))
    await upload_all(publishers, 2, newer, weights(4))
    await second.commit(2)
    assert (await snapshot_of(store, 2)).digest() == root_digest(weights(4))


async def test_a_committer_that_died_before_the_swap_is_followed_by_one_that_commits(monkeypatch):
    store = MemoryStore()
    publishers = local_ranks(store, layouts())
    dying = Trainer(store)
    await upload_all(publishers, 0, await dying.begin())

    async def die(*arguments):
        raise ConnectionResetError("killed before the swap")

    monkeypatch.setattr(dying.committer._history, "commit", die)
    with pytest.raises(ConnectionResetError):
        await dying.commit(0)
    assert (await read_head(store)).policy_version == -1
    again = Trainer(store)
    await upload_all(publishers, 0, await again.begin())
    await again.commit(0)
    assert (await read_head(store)).root_digest == root_digest(weights(0))


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda held: held[0].pop(), "elements 1569 to 1575 came from no rank"),
        (lambda held: held[1].append(held[0][0]), "came from two ranks"),
        (lambda held: held[2][1].pop(), "elements 1558 to 1569 came from no rank"),
    ],
)
async def test_parts_that_do_not_make_a_whole_are_refused(change, error):
    store = MemoryStore()
    held = layouts()
    change(held)
    held = [[runs for runs in layout if runs] for layout in held]
    trainer = Trainer(store)
    await upload_all(local_ranks(store, held), 0, await trainer.begin())
    with pytest.raises(CorruptDataError, match=error):
        await trainer.commit(0)
    assert (await read_head(store)).policy_version == -1


async def test_wrong_markers_and_early_ranks_are_refused(monkeypatch):
    monkeypatch.setattr(store_io, "_GET_RETRY", RetryPolicy(num_attempts_max=5, pause_s=0.0))
    store = MemoryStore()
    trainer = Trainer(store, 1)
    token = await trainer.begin()
    (publisher,) = local_ranks(store, layouts(1))
    with pytest.raises(NotFoundError, match="weights 4: not committed"):
        await upload_all([publisher], 5, token)
    with pytest.raises(ValueError, match="rank 0: expected parts of"):
        await publisher.upload(0, token, [np.zeros(3, np.uint16)])
    await store.put(f"{attempt_prefix(0, token)}00000", b"junk")
    with pytest.raises(DamagedStoreError, match="not a RankUpload"):
        await trainer.commit(0)
    await upload_all([publisher], 0, token)
    await trainer.commit(0)
    other = (*TABLE[:2], TensorSpec("scale", "U32", (3, 7)))
    stranger = RankPublisher(StoreIO(store, no_sleep), 0, other, layouts(1)[0])
    await upload_all([stranger], 1, token)
    with pytest.raises(CorruptDataError, match="rank 0: its tensor table differs"):
        await trainer.commit(1)


def test_a_box_of_a_tensor_is_found_as_runs_of_flat_coordinates():
    table = (TensorSpec("a", "BF16", (3,)), TensorSpec("b", "BF16", (2, 3, 4)),
             TensorSpec("c", "BF16", ()), TensorSpec("d", "BF16", (0, 4)))  # fmt: skip
    whole = np.arange(3, 27).reshape(2, 3, 4)
    assert find_runs(table, "b", ()) == [Extent(3, 24)]
    assert find_runs(table, "c", ()) == [Extent(27, 1)]
    assert find_runs(table, "d", (slice(0, 0),)) == []
    for box in itertools.product(
        (slice(None), slice(1, 2)), (slice(None), slice(1, 3)), (slice(None), slice(2, 4))
    ):
        runs = find_runs(table, "b", box)
        found = [place for run in runs for place in range(run.start, run.start + run.num_elements)]
        assert found == whole[box].reshape(-1).tolist()
    assert len(find_runs(table, "b", (slice(1, 2),))) == 1
    with pytest.raises(NotFoundError, match="tensor z"):
        find_runs(table, "z", ())
    with pytest.raises(ValueError, match=r"shorter|longer"):
        find_runs(table, "a", (slice(None), slice(None)))
    with pytest.raises(ValueError, match=r"tensor b: .*step 1.*slice\(0, 3, 2\)"):
        find_runs(table, "b", (slice(None), slice(0, 3, 2)))


async def test_of_two_committers_in_one_version_the_fenced_one_leaves_what_was_committed():
    store = MemoryStore()
    first, second = (Trainer(store) for _ in range(2))
    token = await first.begin()
    await upload_all(local_ranks(store, layouts()), 0, token)
    await first.commit(0)
    await upload_all(local_ranks(store, layouts()), 1, token)
    known = first.committer._history.known

    async def look_then_be_overtaken(version):
        found = await known(version)
        await upload_all(local_ranks(store, layouts()), 1, await second.begin(), weights(3))
        await second.commit(1)
        return found

    first.committer._history.known = look_then_be_overtaken
    with pytest.raises(StaleTokenError):
        await first.commit(1)
    flat, manifest = await read_back(StoreIO(store, no_sleep, asyncio.to_thread), 1)
    assert flat.digest() == root_digest(weights(3))
    assert manifest.target_root_digest == (await read_head(store)).root_digest


class CountingStore(MemoryStore):
    """Counts the bytes of shards that are read."""

    num_bytes = 0

    async def get(self, key):
        data = await super().get(key)
        if not any(word in key for word in ("attempt", "head", "manifest")):
            self.num_bytes += len(data)
        return data


async def test_a_rank_that_uploads_again_reads_nothing_back():
    store = CountingStore()
    trainer = Trainer(store)
    token = await trainer.begin()
    publishers = local_ranks(store, layouts())
    for version in range(3):
        await upload_all(publishers, version, token)
        await trainer.commit(version)
    store.num_bytes = 0
    for _ in range(2):
        await upload_all(publishers, 3, token)
    await upload_all(publishers, 3, await Trainer(store).begin())
    assert store.num_bytes == 0


async def test_a_marker_that_comes_late_goes_with_the_next_version():
    store = MemoryStore()
    trainer = Trainer(store)
    token = await trainer.begin()
    publishers = local_ranks(store, layouts())
    for version in range(3):
        await upload_all(publishers, version, token)
        await trainer.commit(version)
        await upload_all(local_ranks(store, layouts())[:1], version, token)
    left = [key for key in await store.keys("weights/") if "attempt" in key]
    assert [key.split("/")[1] for key in left] == ["00000002"]


async def test_a_rank_may_hold_a_tensor_without_elements():
    table = (*TABLE, TensorSpec("void", "U32", (0, 4)))
    store = MemoryStore()
    trainer = Trainer(store, 1, table)
    token = await trainer.begin()
    layout = [find_runs(table, spec.name, ()) for spec in table]
    publisher = RankPublisher(StoreIO(store, no_sleep), 0, table, layout)
    for version in range(2):
        tensors = weights(version) | {"void": np.zeros((0, 4), np.uint32)}
        await publisher.upload(version, token, [tensors[spec.name].reshape(-1) for spec in table])
        manifest = await trainer.commit(version)
        assert manifest.target_root_digest == root_digest(tensors)


async def test_shards_against_another_base_are_the_ranks_fault_not_the_stores():
    store = MemoryStore()
    trainer = Trainer(store)
    token = await trainer.begin()
    publishers = local_ranks(store, layouts())
    await upload_all(publishers, 0, token)
    await trainer.commit(0)
    publishers[0]._committed = 0, [part ^ 1 for part in publishers[0]._uploaded[2]]
    await upload_all(publishers, 1, token)
    with pytest.raises(CorruptDataError):
        await trainer.commit(1)


async def test_verifiers_undo_an_attempt_that_failed(monkeypatch):
    """Every second commit dies at the swap; other weights are then uploaded for that version."""
    store = CountingStore()
    trainer, publishers = Trainer(store), local_ranks(store, layouts())
    commit = trainer.committer._history.commit

    async def die(manifest):
        raise ConnectionResetError("no swap")

    for version in range(3):
        token = await trainer.begin()
        await upload_all(publishers, version, token, weights(9))
        monkeypatch.setattr(trainer.committer._history, "commit", die)
        with pytest.raises(ConnectionResetError):
            await trainer.commit(version)
        monkeypatch.setattr(trainer.committer._history, "commit", commit)
        store.num_bytes = 0
        await upload_all(publishers, version, token)
        manifest = await trainer.commit(version)
        assert manifest.target_root_digest == root_digest(weights(version))
        assert store.num_bytes == sum(s.num_bytes for s in manifest.shards if s.extents)


async def test_a_shard_of_two_verifiers_is_refused():
    store, run = MemoryStore(), Extent(0, sum(spec.size for spec in TABLE[:2]))
    held = [[[run], find_runs(TABLE, "scale", ())]]
    trainer = Trainer(store, 1)
    await upload_all(local_ranks(store, held), 0, await trainer.begin())
    with pytest.raises(CorruptDataError, match=r"Extent\(.* crosses the spans of verifiers"):
        await trainer.commit(0)


@pytest.mark.parametrize(("num_ranks", "num_verifiers"), [(1, 1), (3, 2), (5, 9), (40, 3)])
async def test_any_number_of_ranks_and_verifiers_gives_the_digest_of_one(num_ranks, num_verifiers):
    store = MemoryStore()
    trainer = Trainer(store, num_ranks, num_verifiers=num_verifiers)
    held = assign_shards(TABLE, num_ranks, cut_spans(TABLE, num_verifiers), 100)
    publishers = local_ranks(store, held)
    for version in range(2):
        await upload_all(publishers, version, await trainer.begin())
        manifest = await trainer.commit(version)
        assert manifest.target_root_digest == root_digest(weights(version))
        assert (await snapshot_of(store, version)).digest() == root_digest(weights(version))
