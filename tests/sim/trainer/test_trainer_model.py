"""A run that starts from an outside model: version 0 is that model, and replay needs no folder."""

import msgspec
import pytest
from tests.sealed import open_vault
from tests.sim.trainer.conftest import POLICY

from penstock.actors.policy.checkpoint import load_checkpoint, save_checkpoint
from penstock.actors.policy.hf.stored import INDEX_KEY, store_model
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.replay import ReplayLog, replay
from penstock.messages.errors import CorruptDataError
from penstock.messages.training import MidtrainCompleted

MODEL = msgspec.structs.replace(POLICY, mtp_num_heads=0)
DENSE = msgspec.structs.replace(MODEL, num_experts=0, num_experts_per_tok=0, intermediate_size=24)


async def started_from(world, folder, config):
    save_checkpoint(Policy(config, seed=5), folder)
    (folder / "tokenizer.json").write_text("{}")
    await store_model(world.store, folder, [folder / "model.safetensors"])
    world.policy = config
    for path in folder.iterdir():
        path.unlink()


@pytest.mark.parametrize("num_tokens", [0, 64])
async def test_version_0_is_the_model_after_its_mid_training(make_world, tmp_path, num_tokens):
    world = make_world(steps_max=2)
    midtrain = msgspec.structs.replace(world.config.midtrain, num_tokens=num_tokens)
    world.config = msgspec.structs.replace(world.config, midtrain=midtrain)
    await started_from(world, tmp_path, MODEL)
    await world.run()
    [completed] = world.log.of(MidtrainCompleted)
    learner = Learner.initialized(MODEL, world.config.optimizer, seed=0)
    with_model = Policy(MODEL, seed=5)
    learner.policy.load_state_dict(with_model.state_dict())
    assert (learner.weights_digest() == completed.weights_digest) == (num_tokens == 0)
    report = await replay(
        ReplayLog(
            deliveries=world.log.follow(),
            last=world.log.last,
            store=world.store,
            opener=open_vault(),
        ),
        MODEL,
        world.config,
    )
    assert (report.identical, report.steps_compared) == (True, 2), report.first_difference


async def test_a_damaged_weight_file_is_not_trained_from(make_world, tmp_path):
    world = make_world(steps_max=1)
    await started_from(world, tmp_path, DENSE)
    data = bytearray(world.store.objects["model/model.safetensors"])
    data[-1] ^= 1
    world.store.objects["model/model.safetensors"] = bytes(data)
    with pytest.raises(CorruptDataError, match=r"model/model\.safetensors: the bytes do not"):
        await world.run()
    assert INDEX_KEY in world.store.objects
    assert world.log.of(MidtrainCompleted) == []


def test_a_learner_takes_over_a_dense_folder(make_world, tmp_path):
    save_checkpoint(Policy(DENSE, seed=5), tmp_path)
    learner = Learner.initialized(DENSE, make_world().config.optimizer, seed=0)
    learner.load_model(tmp_path)
    assert learner.policy.embedding.equal(load_checkpoint(tmp_path).embedding)
