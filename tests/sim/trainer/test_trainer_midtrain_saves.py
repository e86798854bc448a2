"""Mid-training goes on from the last save of a killed trainer, or of an earlier run, to the bit."""

import msgspec
import numpy as np
import pytest
from tests.sim.trainer.conftest import FakeContext, Killed, MemoryStore, World, small_config

from penstock.actors.trainer.config import MidtrainConfig
from penstock.actors.trainer.midtraining.corpus import Corpus, encode_corpus
from penstock.actors.trainer.midtraining.phase import FOLDER
from penstock.actors.trainer.midtraining.saves import NUM_KEPT, PREFIX, newest_save
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import MidtrainCompleted

MIDTRAIN = MidtrainConfig(
    num_tokens=2048, sequence_tokens=32, batch_tokens=128, report_steps=2, save_s=1e-9
)


class MortalStore(MemoryStore):
    """Kills its user after some puts of saves."""

    def __init__(self, kill_at: set[int]) -> None:
        super().__init__()
        self.num_saves, self.kill_at = 0, kill_at
        self.num_kept_max = 0
        self.damages = False

    async def put(self, key: str, data: bytes | memoryview) -> None:
        if not key.startswith(PREFIX):
            return await super().put(key, data)
        self.num_saves += 1
        await super().put(key, bytes(data[:-8]) if self.damages else data)
        self.num_kept_max = max(self.num_kept_max, len(await self.keys(PREFIX)))
        if self.num_saves in self.kill_at:
            raise Killed
        return None


def make(store: MemoryStore, midtrain: MidtrainConfig = MIDTRAIN, seed: int = 0) -> World:
    world = World(0, small_config(midtrain=midtrain))
    world.store.objects.clear()
    rng = np.random.default_rng(seed)
    for key in ("midtrain/tokens", "midtrain/heldout"):
        tokens = encode_corpus(Corpus(tokens=rng.integers(0, 8, 600).astype(np.int32)))
        store.objects.setdefault(key, tokens)
    world.store = store
    return world


async def midtrained(world: World) -> MidtrainCompleted:
    """Start trainers until one makes version 0."""
    while True:
        ctx, trainer = FakeContext(world.log, world.store), world.trainer()
        try:
            await world.log.publish(*await trainer.start(ctx))
        except Killed:
            continue
        finally:
            await ctx.close()
        return world.log.of(MidtrainCompleted)[0]


async def undisturbed(**settings) -> MidtrainCompleted:
    config = msgspec.structs.replace(MIDTRAIN, save_s=1e9, **settings)
    return await midtrained(make(MemoryStore(), config))


@pytest.mark.parametrize(("kill_at", "mtp_weight"), [({3}, 0.0), ({1, 2, 3, 4, 6}, 0.3)])
async def test_it_goes_on_from_the_last_save_to_the_same_bits(kill_at, mtp_weight) -> None:
    store = MortalStore(kill_at)
    config = msgspec.structs.replace(MIDTRAIN, mtp_weight=mtp_weight)
    world = make(store, config)
    completed = await midtrained(world)
    whole = await undisturbed(mtp_weight=mtp_weight)
    assert completed.weights_digest == whole.weights_digest
    assert completed.num_resumed == len(kill_at) and whole.num_resumed == 0
    assert completed.num_saves == store.num_saves > 6 and whole.num_saves == 0
    for field in ("num_tokens", "loss_first", "loss_last", "heldout_loss"):
        assert getattr(completed, field) == getattr(whole, field)
    assert store.num_kept_max == NUM_KEPT
    assert await store.keys(PREFIX) == [], "dropped once version 0 has its checkpoint"
    point = world.log.of(MidtrainProgressed)[0]  # The only one that this log keeps.
    assert point.num_saves > 0 and point.num_tokens_saved == point.num_tokens


async def test_a_damaged_save_is_passed_over() -> None:
    store = MortalStore({2})
    world = make(store)

    async def damage(key, data):
        store.damages = store.num_saves == 1
        await MortalStore.put(store, key, data)

    store.put = damage
    completed = await midtrained(world)
    assert completed.weights_digest == (await undisturbed()).weights_digest
    assert completed.num_saves == store.num_saves - 1, "the second one was made again"


async def test_a_save_of_other_settings_or_corpora_is_not_taken_up() -> None:
    store = MortalStore({2})
    with pytest.raises(Killed):
        world = make(store)
        await world.trainer().start(FakeContext(world.log, store))
    assert len(await store.keys(PREFIX)) == NUM_KEPT
    assert await newest_save(store, "another") is None
    config = msgspec.structs.replace(MIDTRAIN, learning_rate=1e-4)
    completed = await midtrained(make(store, config))
    assert completed.num_resumed == 0
    assert completed.weights_digest == (await undisturbed(learning_rate=1e-4)).weights_digest


async def test_the_number_of_workers_is_no_other_mid_training() -> None:
    store = MortalStore({2})
    with pytest.raises(Killed):
        world = make(store)
        await world.trainer().start(FakeContext(world.log, store))
    completed = await midtrained(make(store, msgspec.structs.replace(MIDTRAIN, num_workers=1)))
    assert completed.num_resumed == 1
    assert completed.weights_digest == (await undisturbed()).weights_digest


CACHED = msgspec.structs.replace(MIDTRAIN, uses_cache=True, save_s=1e9)
FIGURES = ("num_tokens", "loss_first", "loss_last", "heldout_loss", "weights_digest")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return tmp_path / FOLDER


def assert_same(one, other) -> None:
    assert [getattr(one, name) for name in FIGURES] == [getattr(other, name) for name in FIGURES]


async def test_the_second_run_takes_no_step_and_has_the_same_bits(folder) -> None:
    first = await midtrained(make(MemoryStore(), CACHED))
    whole = await undisturbed()
    world = make(MemoryStore(), CACHED)
    second = await midtrained(world)
    assert (whole.is_cached, first.is_cached, second.is_cached) == (False, False, True)
    assert_same(first, whole)
    assert_same(second, whole)
    for entry in folder.iterdir():
        entry.unlink()
    ctx = FakeContext(world.log, world.store)
    again = [e for e in await world.trainer().start(ctx) if isinstance(e, MidtrainCompleted)]
    await ctx.close()
    assert again == [second], "the run has a checkpoint of its own"


async def test_a_damaged_entry_is_made_again(folder) -> None:
    await midtrained(make(MemoryStore(), CACHED))
    [entry] = folder.iterdir()
    entry.write_bytes(entry.read_bytes()[:-8])
    again = await midtrained(make(MemoryStore(), CACHED))
    assert not again.is_cached
    assert_same(again, await undisturbed())
    assert (await midtrained(make(MemoryStore(), CACHED))).is_cached


@pytest.mark.parametrize(
    ("changes", "seed"),
    [({"learning_rate": 1e-4}, 0), ({"mtp_weight": 0.0}, 0), ({}, 1), ({"seconds": 0.1}, 0)],
)
@pytest.mark.usefixtures("folder")
async def test_other_inputs_are_another_mid_training(changes, seed) -> None:
    await midtrained(make(MemoryStore(), CACHED))
    other = await midtrained(make(MemoryStore(), msgspec.structs.replace(CACHED, **changes), seed))
    assert not other.is_cached


async def test_by_default_nothing_is_kept(folder) -> None:
    await undisturbed()
    assert not folder.exists()
