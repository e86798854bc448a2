"""Checkpoints: whole or refused."""

import msgspec
import pytest
import xxhash
from tests.sim.trainer.conftest import FakeContext, Killed, MemoryStore

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.checkpoint import (
    drop_old_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    read_head,
    save_checkpoint,
)
from penstock.actors.trainer.engines import pieces
from penstock.actors.trainer.learner import Learner
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.training import CheckpointSaved, MidtrainCompleted, StepCompleted


@pytest.fixture
async def world(make_world):
    world = make_world(steps_max=2, checkpoint_steps=1, checkpoints_kept=5)
    await world.run()
    return world


async def load(world, key, learner):
    return await load_checkpoint(FakeContext(world.log, world.store), key, learner)


def learner_of(world, seed=99, **changes):
    policy = world.trainer()._policy_config
    return Learner.initialized(changes.get("policy", policy), world.config.optimizer, seed)


async def test_it_holds_weights_moments_and_the_facts_of_its_step(world):
    key = await newest_checkpoint(world.store)
    learner = learner_of(world)
    head = await load(world, key, learner)
    completed = world.log.of(StepCompleted)[-1]
    assert (head.step, head.completed) == (2, completed)
    assert learner.weights_digest() == completed.weights_digest
    assert learner.optimizer_digest() == completed.optimizer_digest
    assert sum(row.trained for row in head.ledger.values()) > 0
    saved = world.log.of(CheckpointSaved)
    assert [event.object_key for event in saved] == await world.store.keys("checkpoints/")


async def test_step_0_is_that_of_mid_training(world):
    key = (await world.store.keys("checkpoints/"))[0]
    head = await load(world, key, learner_of(world))
    assert (head.step, head.completed) == (0, world.log.of(MidtrainCompleted)[0])


@pytest.mark.parametrize("position", [0, 60, -1])
async def test_a_flipped_bit_is_found(world, position):
    key = await newest_checkpoint(world.store)
    data = bytearray(world.store.objects[key])
    data[position] ^= 1
    world.store.objects[key] = bytes(data)
    with pytest.raises(CorruptDataError, match="do not match the digest in the name"):
        await load(world, key, learner_of(world))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"dtype":"float32"', b'"dtype":"load"'),
        (b'"dtype":"float32"', b'"dtype":"bool"'),
        (b'"num_bytes":', b'"num_bytes":-'),
        (b'"shape":[', b'"shape":[-1,'),
    ],
)
async def test_a_head_that_describes_no_tensors_is_refused(world, old, new):
    head = world.store.objects[await newest_checkpoint(world.store)].replace(old, new)
    key = f"checkpoints/00000009-{xxhash.xxh3_128_hexdigest(head)}"
    world.store.objects[key] = head
    with pytest.raises(CorruptDataError, match=f"{key}: not a checkpoint"):
        await load(world, key, learner_of(world))


async def test_another_policys_checkpoint_is_refused(world):
    other = PolicyConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, head_dim=8)
    key = await newest_checkpoint(world.store)
    with pytest.raises(CorruptDataError, match="tensors of this policy's shape"):
        await load_checkpoint(
            FakeContext(world.log, world.store), key, learner_of(world, policy=other)
        )


async def test_a_missing_object_is_named(world):
    with pytest.raises(NotFoundError):
        await load_checkpoint(
            FakeContext(world.log, world.store), "checkpoints/00000009-00", learner_of(world)
        )


class Dying(MemoryStore):
    """Fails at its nth object from now on, as a process killed there."""

    def __init__(self, objects, num_left):
        super().__init__()
        self.objects, self.num_left = objects, num_left

    async def put(self, key, data):
        self.num_left -= 1
        if self.num_left < 0:
            raise Killed
        await super().put(key, data)


async def test_a_kill_between_objects_leaves_the_checkpoint_before(world, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES_MAX", 2048)
    key = await newest_checkpoint(world.store)
    learner = learner_of(world)
    completed = (await load(world, key, learner)).completed
    later = msgspec.structs.replace(completed, step=3)
    before = set(world.store.objects)
    num_pieces = 0
    for num_left in (0, 1, 3, 1000):
        dying = Dying(world.store.objects, num_left)
        try:
            await save_checkpoint(FakeContext(world.log, dying), learner, later, {})
        except Killed:
            assert await newest_checkpoint(world.store) == key
            await load(world, key, learner_of(world))
            num_pieces = len(set(world.store.objects) - before)
    assert num_pieces == 3, "the third attempt had stored three"
    newest = await newest_checkpoint(world.store)
    assert newest.startswith("checkpoints/00000003-")
    found = learner_of(world)
    await load(world, newest, found)
    assert found.weights_digest() == completed.weights_digest
    head = await read_head(world.store, newest)
    assert len(head.stored.pieces) > 3
    assert all(piece.num_bytes <= 2048 for piece in head.stored.pieces)


async def test_pieces_of_no_checkpoint_are_deleted_when_a_later_step_has_one(world):
    dead = "checkpoint-pieces/00000001-00"
    coming = "checkpoint-pieces/00000003-00"
    for key in await world.store.keys("checkpoint-pieces/00000001-"):
        await world.store.delete(key)
    world.store.objects = {
        key: data
        for key, data in world.store.objects.items()
        if not key.startswith("checkpoints/00000001-")
    } | {dead: b"x", coming: b"y"}
    await drop_old_checkpoints(world.store, 1)
    assert dead not in world.store.objects
    assert coming in world.store.objects, "it may be in progress"
    await load(world, await newest_checkpoint(world.store), learner_of(world))
    await drop_old_checkpoints(world.store, 1)
    assert {key.split("-")[-2][-8:] for key in await world.store.keys("checkpoint-pieces/")} == {
        "00000000",
        "00000002",
        "00000003",
    }


async def test_a_damaged_or_missing_piece_is_named(world):
    key = await newest_checkpoint(world.store)
    (piece,) = (await read_head(world.store, key)).stored.pieces
    data = bytearray(world.store.objects[piece.object_key])
    data[100] ^= 1
    world.store.objects[piece.object_key] = bytes(data)
    with pytest.raises(CorruptDataError, match=f"{piece.object_key}: the bytes do not match"):
        await load(world, key, learner_of(world))
    del world.store.objects[piece.object_key]
    with pytest.raises(NotFoundError):
        await load(world, key, learner_of(world))


@pytest.mark.parametrize("what", ["head", "piece", "missing piece"])
async def test_a_damaged_checkpoint_falls_back_to_the_one_before(make_world, caplog, what):
    """The steps after it are taken again, to the digests that the log has."""
    world = make_world(steps_max=5, checkpoint_steps=1, checkpoints_kept=5)
    world.log.num_until_kill = 7
    with pytest.raises(Killed):
        await world.run_once()
    key = await newest_checkpoint(world.store)
    step = (await read_head(world.store, key)).step
    assert step >= 2
    piece = (await world.store.keys(f"checkpoint-pieces/{step:08d}-"))[0]
    damaged = key if what == "head" else piece
    if what == "missing piece":
        await world.store.delete(piece)
    else:
        world.store.objects[damaged] = world.store.objects[damaged][:-1] + b"\x00"
    await world.run_once()
    assert f"checkpoint {key} is unusable, trying the one before" in caplog.text
    assert [event.step for event in world.log.of(StepCompleted)] == [1, 2, 3, 4, 5]
    learner = learner_of(world)
    for each in await world.store.keys("checkpoints/"):
        await load(world, each, learner)


async def test_without_a_sound_checkpoint_the_trainer_says_so(world):
    for key in await world.store.keys("checkpoints/"):
        world.store.objects[key] = world.store.objects[key][:-1] + b"\x00"
    with pytest.raises(CorruptDataError, match="none of 3 checkpoints is sound"):
        await world.run_once()
