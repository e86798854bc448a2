"""A mid-training that an earlier run finished is taken from the cache, to the same bits."""

import msgspec
import pytest
from tests.sim.trainer.conftest import FakeContext, MemoryStore
from tests.sim.trainer.test_trainer_midtrain_saves import MIDTRAIN, make, midtrained, undisturbed

from penstock.actors.trainer.midtraining.finished import FOLDER
from penstock.messages.training import MidtrainCompleted

CACHED = msgspec.structs.replace(MIDTRAIN, uses_cache=True, save_s=1e9)
FIGURES = ("num_tokens", "loss_first", "loss_last", "heldout_loss", "weights_digest")


@pytest.fixture(autouse=True)
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
async def test_other_inputs_are_another_mid_training(changes, seed) -> None:
    await midtrained(make(MemoryStore(), CACHED))
    other = await midtrained(make(MemoryStore(), msgspec.structs.replace(CACHED, **changes), seed))
    assert not other.is_cached


async def test_by_default_nothing_is_kept(folder) -> None:
    await undisturbed()
    assert not folder.exists()
