"""A restarted rank or verifier reads what it needs of the store, not the whole image."""

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.sim.sync.rank_process import TABLE, weights
from tests.sim.sync.ranks import Trainer, assign_shards, layouts, local_ranks, no_sleep, upload_all

from penstock.actors.relay.core.flat_snapshot import FlatSnapshot
from penstock.actors.relay.core.objects import is_manifest
from penstock.actors.relay.core.store_io import DamagedStoreError, StoreIO
from penstock.actors.relay.publish.history import read_back_part
from penstock.actors.relay.publish.spans import cut_spans
from penstock.actors.relay.publish.verifier import SpanVerifier
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest
from penstock.kernels.element_types import TensorSpec
from penstock.messages.weights import Extent

NUM_RANKS = 4
NUM_VERSIONS = 4
EVEN = tuple(TensorSpec(f"layer.{n}", "BF16", (16, 64)) for n in range(8))
"""Tensors that four ranks share evenly."""


class CountingStore(MemoryStore):
    """Counts the bytes of weights that are read."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    async def get(self, key):
        data = await super().get(key)
        is_weight = key.startswith("weights/0") and not is_manifest(key)
        self.num_bytes += len(data) * (is_weight and "attempt" not in key and "table" not in key)
        return data


def even_weights(version):
    rng = np.random.default_rng(11)
    made = {s.name: rng.integers(0, 1 << 16, s.shape).astype(s.element_type.storage) for s in EVEN}
    for _ in range(version):
        for array in made.values():
            flat = array.reshape(-1)
            flat[rng.integers(0, flat.size, 3)] += 1
    return made


def io_of(store):
    return StoreIO(store, no_sleep, asyncio.to_thread)


@pytest.fixture
async def published():
    """Publish some versions by four ranks, cut alike every time; return store, trainer, cuts."""
    store = CountingStore()
    spans = cut_spans(EVEN, NUM_RANKS)
    cuts = assign_shards(EVEN, NUM_RANKS, spans)
    trainer = Trainer(store, NUM_RANKS, EVEN, NUM_RANKS)
    publishers = local_ranks(store, cuts, EVEN)
    token = await trainer.begin()
    for version in range(NUM_VERSIONS):
        await upload_all(publishers, version, token, even_weights(version))
        await trainer.commit(version)
    return store, trainer, cuts, spans


async def image_bytes(store):
    """Return the bytes that reading the newest version whole takes."""
    before = store.num_bytes
    whole = [Extent(0, sum(spec.size for spec in EVEN))]
    flat = await read_back_part(io_of(store), NUM_VERSIONS - 1, whole)
    assert root_digest(flat.tensors) == root_digest(even_weights(NUM_VERSIONS - 1))
    read, store.num_bytes = store.num_bytes - before, 0
    return read


async def test_a_restarted_rank_reads_its_own_part_alone(published):
    store, trainer, cuts, _ = published
    whole = await image_bytes(store)
    again = local_ranks(store, cuts, EVEN)
    token = await trainer.begin()
    await upload_all(again[1:2], NUM_VERSIONS, token, even_weights(NUM_VERSIONS))
    assert 0 < store.num_bytes <= whole / NUM_RANKS * 1.2
    await upload_all([*again[:1], *again[2:]], NUM_VERSIONS, token, even_weights(NUM_VERSIONS))
    manifest = await trainer.commit(NUM_VERSIONS)
    assert manifest.target_root_digest == root_digest(even_weights(NUM_VERSIONS))


async def test_a_restarted_verifier_reads_its_own_span_alone(published):
    store, trainer, cuts, spans = published
    whole = await image_bytes(store)
    trainer.verifiers[2] = SpanVerifier(StoreIO(store), 2, spans[2])
    ranks = local_ranks(store, cuts, EVEN)
    token = await trainer.begin()
    await upload_all(ranks, NUM_VERSIONS, token, even_weights(NUM_VERSIONS))
    store.num_bytes = 0
    manifest = await trainer.commit(NUM_VERSIONS)
    assert manifest.target_root_digest == root_digest(even_weights(NUM_VERSIONS))
    deltas = sum(shard.num_bytes for shard in manifest.shards if shard.codec != "table")
    assert 0 < store.num_bytes - deltas <= whole / NUM_RANKS * 1.2


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_part_of_any_cut_is_read_back_as_it_is(data):
    """Ranks hold columns here, so that shards interleave: the part may take more than its own."""
    total = sum(spec.size for spec in TABLE)
    start = data.draw(st.integers(0, total - 1))
    size = data.draw(st.integers(1, total - start))
    version = data.draw(st.integers(0, 2))
    asyncio.run(check_part(start, size, version))


async def check_part(start, size, version):
    store = CountingStore()
    trainer = Trainer(store)
    publishers = local_ranks(store, layouts())
    token = await trainer.begin()
    for number in range(version + 1):
        await upload_all(publishers, number, token)
        await trainer.commit(number)
    flat = await read_back_part(io_of(store), version, [Extent(start, size)])
    expected = FlatSnapshot.of(weights(version))
    for spec, begin in zip(TABLE, np.cumsum([0, *(s.size for s in TABLE)]), strict=False):
        low, high = max(start, begin), min(start + size, begin + spec.size)
        if low < high:
            run = [Extent(int(low), int(high - low))]
            assert np.array_equal(flat.part(run), expected.part(run))


async def test_a_part_whose_objects_are_damaged_is_refused(published):
    store, _, cuts, _ = published
    (key,) = [k for k in await store.keys("weights/00000002/delta/") if "/1-" in k]
    store._objects[key] = store._objects[key][:-1]
    with pytest.raises(DamagedStoreError):
        await read_back_part(io_of(store), NUM_VERSIONS - 1, cuts[0][0])
