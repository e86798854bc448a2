"""The publisher: idempotent, fenced, and able to find its base again."""

import asyncio

import msgspec
import numpy as np
import pytest
from tests.sim.sync.world import FakeContext, manifest_in

from penstock.actors.relay.core.catalog import Catalog
from penstock.actors.relay.core.digests import add_to_digest
from penstock.actors.relay.core.flat_snapshot import (
    SHARD_ELEMENTS_MAX,
    FlatSnapshot,
    cut,
    tensor_table,
)
from penstock.actors.relay.core.objects import manifest_key
from penstock.actors.relay.core.store_io import DamagedStoreError, StoreIO, read_manifest
from penstock.actors.relay.core.version_head import StaleTokenError, read_head
from penstock.actors.relay.publish.history import read_back
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.replica.weight_replica import WeightReplica
from penstock.infra.stores.directory import DirectoryStore
from penstock.kernels.delta import Patch
from penstock.kernels.digest import root_digest, run_element_sum
from penstock.messages.errors import (
    CorruptDataError,
    NotFoundError,
    PublishConflictError,
    StoreFullError,
)
from penstock.messages.weights import Extent, SnapshotKind


async def no_sleep(duration_s):
    """Take no time."""


@pytest.fixture
def store(tmp_path):
    return DirectoryStore(tmp_path)


def publisher(store):
    return Publisher(StoreIO(store, no_sleep))


def versions(count, seed=0):
    rng = np.random.default_rng(seed)
    state = {
        "a": rng.integers(0, 1 << 16, (30, 7), np.uint16),
        "b.half": rng.integers(0, 1 << 16, 50, np.uint16),
        "c.float": rng.standard_normal((5, 3)).astype(np.float32),
    }
    for _ in range(count):
        yield {name: array.copy() for name, array in state.items()}
        for array in state.values():
            flat = array.reshape(-1)
            flat[rng.integers(0, flat.size, 3)] += 1


async def prepare(target, version, snapshot):
    return await target.prepare(
        version, snapshot, optimizer_step=version, config_json='{"layers": 1}'
    )


async def test_only_version_0_is_whole_and_the_chain_of_digests_closes(store):
    target = publisher(store)
    before = ""
    for version, snapshot in enumerate(versions(5)):
        manifest = await prepare(target, version, snapshot)
        assert manifest.kind is (SnapshotKind.FULL if version == 0 else SnapshotKind.DELTA)
        assert manifest.base_version == version - 1
        assert manifest.base_root_digest == before
        before = manifest.target_root_digest
        assert before == root_digest(snapshot)
        assert manifest.full_bytes == sum(array.nbytes for array in snapshot.values())
        assert bool(manifest.config_json) == (version == 0)
        assert manifest.num_changed <= (9 if version else manifest.num_params)


async def test_preparing_again_gives_an_equal_manifest_and_puts_nothing(store):
    target = publisher(store)
    first, second = versions(2)
    await prepare(target, 0, first)
    manifest = await prepare(target, 1, second)
    keys = await store.keys("")
    assert await prepare(target, 1, second) == manifest
    assert await store.keys("") == keys


async def test_a_restarted_publisher_reads_its_base_back_and_goes_on_with_a_delta(store):
    history = list(versions(7))
    target = publisher(store)
    for version, snapshot in enumerate(history[:5]):
        await prepare(target, version, snapshot)
    restarted = publisher(store)
    again = await prepare(restarted, 4, history[4])
    assert again.fencing_token == 1
    other = publisher(store)
    manifest = await prepare(other, 5, history[5])
    assert (manifest.kind, manifest.fencing_token) == (SnapshotKind.DELTA, 3)
    await prepare(other, 6, history[6])
    assert await _snapshot(store, 6) == root_digest(history[6])


async def _snapshot(store, version):
    catalog = Catalog(store)
    await catalog.refresh()
    replica = WeightReplica(store, catalog)
    await replica.advance(version, FakeContext(store))
    return replica.snapshot.digest()


async def test_a_publisher_that_was_taken_over_is_refused(store):
    history = list(versions(3))
    old, new = publisher(store), publisher(store)
    await prepare(old, 0, history[0])
    await prepare(new, 1, history[1])
    with pytest.raises(StaleTokenError, match="fencing token 1"):
        await prepare(old, 2, history[2])
    assert not await store.keys("weights/00000002/delta/manifest")


async def test_other_weights_for_a_prepared_version_are_refused(store):
    target = publisher(store)
    first, second = versions(2)
    await prepare(target, 0, first)
    with pytest.raises(PublishConflictError, match="weights 0"):
        await prepare(target, 0, second)


async def test_a_version_without_its_base_is_refused(store):
    (snapshot,) = versions(1)
    with pytest.raises(NotFoundError, match="weights 6"):
        await prepare(publisher(store), 7, snapshot)


async def test_another_set_of_tensors_is_refused_by_name(store):
    target = publisher(store)
    first, second = versions(2)
    await prepare(target, 0, first)
    with pytest.raises(ValueError, match=r"b\.half"):
        await prepare(target, 1, second | {"b.half": second["b.half"][:-1]})
    with pytest.raises(ValueError, match="float64"):
        await prepare(target, 1, {"a": np.zeros(3)})


async def test_a_damaged_base_in_the_store_is_named(store, tmp_path):
    history = list(versions(3))
    target = publisher(store)
    manifest = await prepare(target, 0, history[0])
    key = manifest.shards[1].object_key
    data = bytearray((tmp_path / key).read_bytes())
    data[-1] ^= 1
    (tmp_path / key).write_bytes(data)
    with pytest.raises(DamagedStoreError, match=key):
        await prepare(publisher(store), 1, history[1])


async def test_a_damaged_manifest_is_named(store, tmp_path):
    (first,) = versions(1)
    await prepare(publisher(store), 0, first)
    (tmp_path / await manifest_in(store, "00000000/full")).write_bytes(b"junk")
    with pytest.raises(DamagedStoreError, match="full/manifest-"):
        await prepare(publisher(store), 0, first)


async def test_of_two_that_race_one_is_fenced_at_the_swap_though_it_looked_before(store):
    """The stale one uploads everything; only the swap of the head tells."""
    history = list(versions(3))
    old, new = publisher(store), publisher(store)
    await prepare(old, 0, history[0])
    await prepare(old, 1, history[1])
    late = {"looked": False}
    hold = old._history.head.hold

    async def look_then_be_overtaken():
        await hold()
        late["looked"] = True
        await prepare(new, 1, history[1])

    old._history.head.hold = look_then_be_overtaken
    with pytest.raises(StaleTokenError, match="token 2"):
        await prepare(old, 2, history[2])
    assert late["looked"]
    head = await read_head(store)
    assert (head.token, head.policy_version) == (2, 1)
    other = {name: array ^ 1 if array.dtype == np.uint16 else array
             for name, array in history[2].items()}  # fmt: skip
    manifest = await prepare(new, 2, other)
    assert manifest.fencing_token == 2
    assert (await read_head(store)).root_digest == root_digest(other)


async def test_one_that_is_overtaken_within_a_version_leaves_what_was_committed(store):
    """While the first encodes a version, the second commits it, from other weights."""
    history = list(versions(4))
    other = [{name: array.copy() for name, array in snapshot.items()} for snapshot in history]
    for snapshot in other[1:]:
        snapshot["a"] ^= 1
    old, new = publisher(store), publisher(store)
    await prepare(old, 0, history[0])
    known = old._history.known

    async def look_then_be_overtaken(version):
        found = await known(version)
        await prepare(new, 1, other[1])
        return found

    old._history.known = look_then_be_overtaken
    with pytest.raises(StaleTokenError, match="token 2"):
        await prepare(old, 1, history[1])
    assert len(await store.keys("weights/00000001/delta/manifest-")) == 2
    head = await read_head(store)
    manifest = await read_manifest(store, head.manifest_key)
    assert (manifest.fencing_token, manifest.target_root_digest) == (2, head.root_digest)
    await prepare(new, 2, other[2])
    restarted = publisher(store)
    assert (await prepare(restarted, 1, other[1])).fencing_token == 2
    with pytest.raises(PublishConflictError, match="weights 1"):
        await prepare(restarted, 1, history[1])
    await prepare(restarted, 3, other[3])
    flat, _ = await read_back(StoreIO(store, no_sleep, asyncio.to_thread), 3)
    assert flat.digest() == root_digest(other[3])


async def test_a_commit_deletes_the_manifests_of_attempts_before_it(store, monkeypatch):
    history = list(versions(3))
    target = publisher(store)
    await prepare(target, 0, history[0])
    monkeypatch.setattr(target._history, "commit", _die)
    with pytest.raises(ConnectionResetError):
        await prepare(target, 1, history[1])
    manifest = await prepare(publisher(store), 1, history[2])
    assert await manifest_in(store, "00000001/delta") == manifest_key(manifest)


async def _die(*arguments):
    raise ConnectionResetError("killed before the swap")


async def test_a_head_without_the_key_of_its_manifest_is_told(store):
    slot = {"number": 0, "token": 1, "policy_version": 3, "root_digest": "00", "owner": "a"}
    await store.put("weights/head/00000000", msgspec.msgpack.encode(slot))
    (snapshot,) = versions(1)
    with pytest.raises(CorruptDataError, match="start a new run"):
        await prepare(publisher(store), 4, snapshot)


async def test_the_base_moves_only_when_a_version_is_committed(store, monkeypatch):
    history = list(versions(3))
    target = publisher(store)
    await prepare(target, 0, history[0])
    put = store.put

    async def full(key, data):
        if "/head/" in key:
            raise StoreFullError("no room")
        await put(key, data)

    monkeypatch.setattr(store, "put", full)
    with pytest.raises(StoreFullError):
        await prepare(target, 1, history[1])
    assert (await read_head(store)).policy_version == 0
    monkeypatch.undo()
    manifest = await prepare(target, 1, history[2])
    assert manifest.base_root_digest == root_digest(history[0])
    assert (await read_head(store)).root_digest == root_digest(history[2])


@pytest.mark.parametrize("num_elements_max", [7, 64, 1 << 24])
async def test_every_cut_gives_the_same_digests_and_the_same_weights(store, num_elements_max):
    target = Publisher(StoreIO(store, no_sleep), cut_shards=lambda t: cut(t, num_elements_max))
    for version, snapshot in enumerate(versions(4)):
        manifest = await prepare(target, version, snapshot)
        flat = FlatSnapshot.of(snapshot)
        sums = (run_element_sum(run.start, flat.part([run])) for run in cut(flat.table))
        assert manifest.target_element_digest == add_to_digest("", sum(sums))
        assert manifest.target_root_digest == root_digest(snapshot)
    assert len(manifest.shards) == {7: 41, 64: 6, 1 << 24: 2}[num_elements_max]
    assert await _snapshot(store, 3) == root_digest(snapshot)


def test_a_snapshot_is_cut_by_dtype_and_size_in_flat_coordinates():
    shapes = {"a": (10,), "b": (10,), "c": (1,), "d": (3, 20), "e": (), "none": (0, 4)}
    snapshot = {name: np.full(shape, 3, np.uint16) for name, shape in shapes.items()}
    snapshot["0"] = np.ones(4, np.float32)
    table = tensor_table(snapshot)
    assert [tuple(msgspec.to_builtins(extent)) for extent in cut(table, 50)] == [
        (0, 50), (50, 32), (82, 4)
    ]  # fmt: skip
    flat = FlatSnapshot.of(snapshot)
    assert flat.digest() == root_digest(snapshot)
    assert flat.part([Extent(13, 2), Extent(0, 1)]).tolist() == [3, 3, 3]
    for wrong in ([Extent(81, 2)], [Extent(81, 1), Extent(82, 1)], [Extent(-1, 2)], []):
        with pytest.raises(CorruptDataError):
            flat.part(wrong)
    assert SHARD_ELEMENTS_MAX * 2 == 32 << 20


def test_what_an_update_touched_is_told_by_tensor():
    flat = FlatSnapshot.of({"a": np.zeros((2, 3), np.uint16), "b": np.zeros(4, np.uint16)})
    extents = [Extent(7, 3), Extent(0, 7)]
    patch = Patch(np.array([2, 8, 9, 3]), np.array([9, 7, 5, 4], np.uint16))
    touched = flat.overwrite(extents, patch)
    again = flat.overwrite(extents, Patch(np.array([9]), np.array([6], np.uint16)))
    found = flat.patches([touched, again])
    assert {n: (p.flat_indices.tolist(), p.values.tolist()) for n, p in found.items()} == {
        "a": ([0, 5], [4, 7]),
        "b": ([0, 3], [6, 9]),
    }


class CountingArray(np.ndarray):
    """Counts the passes over it."""

    num_passes = 0

    def __array_ufunc__(self, *arguments, **options):
        CountingArray.num_passes += 1
        plain = [part.view(np.ndarray) if isinstance(part, CountingArray) else part
                 for part in arguments[2:]]  # fmt: skip
        return getattr(arguments[0], arguments[1])(*plain, **options)


def test_an_update_passes_over_its_changes_as_often_whatever_the_number_of_runs():
    for num_runs in (4, 512):
        flat = FlatSnapshot.of(
            {"a": np.zeros((num_runs, 8), np.uint16), "b": np.zeros(3, np.uint32)}
        )
        extents = [Extent(8 * row + 2, 4) for row in range(num_runs)]
        places = np.arange(0, 4 * num_runs, 3).view(CountingArray)
        CountingArray.num_passes = 0
        flat.overwrite(extents, Patch(places, np.arange(1, places.size + 1, dtype=np.uint16)))
        assert CountingArray.num_passes <= 4
        part = flat.tensors["a"][:, 2:6].reshape(-1)
        assert part[places.view(np.ndarray)].tolist() == list(range(1, places.size + 1))
        assert np.count_nonzero(flat.tensors["a"]) == places.size
