"""Checkpoints: whole or refused."""

import pytest

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.checkpoint import load_checkpoint, newest_checkpoint
from penstock.actors.trainer.learner import Learner
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.training import CheckpointSaved, MidtrainCompleted, StepCompleted


@pytest.fixture
async def world(make_world):
    world = make_world(steps_max=2, checkpoint_steps=1, checkpoints_kept=5)
    await world.run()
    return world


def learner_of(world, seed=99, **changes):
    policy = world.trainer()._policy_config
    return Learner.initialized(changes.get("policy", policy), world.config.optimizer, seed)


async def test_it_holds_weights_moments_and_the_facts_of_its_step(world):
    key = await newest_checkpoint(world.store)
    learner = learner_of(world)
    head = await load_checkpoint(world.store, key, learner)
    completed = world.log.of(StepCompleted)[-1]
    assert (head.step, head.completed) == (2, completed)
    assert learner.weights_digest() == completed.weights_digest
    assert learner.optimizer_digest() == completed.optimizer_digest
    assert sum(row.trained for row in head.ledger.values()) > 0
    saved = world.log.of(CheckpointSaved)
    assert [event.object_key for event in saved] == await world.store.keys("checkpoints/")


async def test_step_0_is_that_of_mid_training(world):
    key = (await world.store.keys("checkpoints/"))[0]
    head = await load_checkpoint(world.store, key, learner_of(world))
    assert (head.step, head.completed) == (0, world.log.of(MidtrainCompleted)[0])


@pytest.mark.parametrize("position", [0, 60, -1])
async def test_a_flipped_bit_is_found(world, position):
    key = await newest_checkpoint(world.store)
    data = bytearray(world.store.objects[key])
    data[position] ^= 1
    world.store.objects[key] = bytes(data)
    with pytest.raises(CorruptDataError, match="do not match the digest in the name"):
        await load_checkpoint(world.store, key, learner_of(world))


async def test_another_policys_checkpoint_is_refused(world):
    other = PolicyConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, head_dim=8)
    key = await newest_checkpoint(world.store)
    with pytest.raises(CorruptDataError, match="tensors of this policy's shape"):
        await load_checkpoint(world.store, key, learner_of(world, policy=other))


async def test_a_missing_object_is_named(world):
    with pytest.raises(NotFoundError):
        await load_checkpoint(world.store, "checkpoints/00000009-00", learner_of(world))
