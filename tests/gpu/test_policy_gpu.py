"""The policy, its training and its engine on a CUDA device: near the CPU's, the same bits twice.

The tolerances are those of docs/kernels.md.
"""

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.engine_rollouts import SPARSE, manifest_of, sample_rollout
from tests.numerics.ranks.steps import Steps, on_ranks

from penstock.actors.generator.core import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import NumericsConfig
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.config import MidtrainConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner, published
from penstock.actors.trainer.midtraining.corpus import Corpus, MidtrainCorpora
from penstock.actors.trainer.midtraining.midtrain import Midtrainer
from penstock.actors.trainer.step import train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICE = "cuda"
LOGPROB_NATS_MAX, GRADIENT_SHARE_MAX = 1e-4, 1e-3
DENSE = msgspec.structs.replace(
    SPARSE, num_experts=0, num_experts_per_tok=0, intermediate_size=64, moe_intermediate_size=64
)
MXFP8 = msgspec.structs.replace(SPARSE, numerics=NumericsConfig(expert_format="mxfp8"))
each_policy = pytest.mark.parametrize("config", [SPARSE, DENSE, MXFP8], ids=["moe", "dense", "mx"])


def learner_on(device, config=SPARSE):
    learner = Learner.initialized(config, OptimizerConfig(), 1, device)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.mul_(3.0)  # Far from uniform, so that an error would show.
    learner.versions.reference = published(learner.parameters)
    return learner


async def sampled(device, learner, num_rollouts=6):
    engine = TorchEngine(learner.policy.config, EngineOptions(device=device))
    engine.start()
    try:
        await engine.begin_update()
        state = publishable_state(learner.policy)
        await engine.apply({name: as_numpy(tensor) for name, tensor in state.items()})
        await engine.commit(0)
        # One after the other: a product's bits depend on how many rows share it.
        turns = {f"r{seed}": await sample_rollout(engine, seed) for seed in range(num_rollouts)}
        return turns, engine.capabilities().arithmetic, await engine.digest()
    finally:
        await engine.stop()


def take(world, steps):
    return steps.take(steps.ranked(world))


@each_policy
async def test_logprobs_and_gradients_are_near_the_cpus(config):
    turns, _, _ = await sampled("cpu", learner_on("cpu", config))
    found, gradients = {}, {}
    for device in ("cpu", DEVICE):
        learner = learner_on(device, config)
        with torch.no_grad():
            states = {name: each.clone() for name, each in learner.parameters.items()}
        result = train_step(learner, manifest_of(turns), turns, TrainerConfig())
        found[device] = result.metrics
        gradients[device] = {
            name: learner.optimizer.state[each]["exp_avg"].cpu()
            for name, each in learner.parameters.items()
        }
        assert not all(torch.equal(states[name], each) for name, each in learner.parameters.items())
    assert found[DEVICE]["router_mismatch"] <= 0.01
    for name in ("logprob_mean", "entropy", "kl_reference"):
        assert found[DEVICE][name] == pytest.approx(found["cpu"][name], abs=LOGPROB_NATS_MAX)
    for name, expected in gradients["cpu"].items():
        difference = (gradients[DEVICE][name] - expected).norm()
        assert difference <= GRADIENT_SHARE_MAX * expected.norm() + 1e-7, name


@each_policy
async def test_steps_taken_again_give_the_same_bits(config):
    turns, _, _ = await sampled("cpu", learner_on("cpu", config))
    results = []
    for num_workers, checkpointing in ((1, False), (3, False), (2, True)):
        learner = learner_on(DEVICE, config)
        settings = TrainerConfig(
            num_passes=2,
            num_workers=num_workers,
            activation_checkpointing=checkpointing,
            micro_batch_tokens=64,
        )
        for step in range(1, 6):
            result = train_step(learner, manifest_of(turns, step), turns, settings)
        results.append((result.weights_digest, result.optimizer_digest, result.metrics["loss"]))
    assert results[0] == results[1] == results[2]


async def test_a_checkpoint_goes_from_one_device_to_the_other():
    learner = learner_on(DEVICE)
    turns, _, _ = await sampled("cpu", learner_on("cpu"))
    train_step(learner, manifest_of(turns), turns, TrainerConfig())
    host = learner_on("cpu")
    host.load_state({name: tensor.cpu() for name, tensor in learner.state().items()})
    assert host.weights_digest() == learner.weights_digest()
    assert host.optimizer_digest() == learner.optimizer_digest()
    back = learner_on(DEVICE)
    back.load_state(host.state())
    steps = [train_step(each, manifest_of(turns, 2), turns, TrainerConfig())
             for each in (learner, back)]  # fmt: skip
    assert steps[0].weights_digest == steps[1].weights_digest


@each_policy
async def test_the_engine_samples_what_the_trainer_computes(config):
    learner = learner_on(DEVICE, config)
    turns, arithmetic, digest = await sampled(DEVICE, learner)
    again, _, _ = await sampled(DEVICE, learner)
    assert arithmetic == f"{DEVICE}/{config.numerics.expert_format}"
    assert digest == (await sampled("cpu", learner))[2]
    assert msgspec.msgpack.encode(turns) == msgspec.msgpack.encode(again)
    metrics = train_step(learner, manifest_of(turns), turns, TrainerConfig()).metrics
    assert metrics["router_mismatch"] <= 0.01
    assert metrics["mismatch_k3"] <= LOGPROB_NATS_MAX**2


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
async def test_ranks_on_gpus_train_to_the_bits_of_one_gpu(num_ranks):
    if torch.cuda.device_count() < num_ranks:
        pytest.skip(f"fewer than {num_ranks} GPUs")
    turns, _, _ = await sampled("cpu", learner_on("cpu"))
    steps = Steps(
        policy=SPARSE,
        config=TrainerConfig(device=DEVICE, micro_batch_tokens=60),
        manifests=[manifest_of(turns, step) for step in range(1, 4)],
        turns=turns,
    )
    expected = steps.take(steps.local())
    for found in on_ranks(num_ranks, take, steps, device=DEVICE):
        assert found == expected


def test_mid_training_taken_again_gives_the_same_bits():
    random = np.random.default_rng(0)
    corpus = Corpus(
        tokens=random.integers(0, SPARSE.vocab_size, 4000).astype(np.int32),
        lengths=np.full(40, 100, np.int32),
        weights=None,
    )
    config = MidtrainConfig(
        num_tokens=4000, sequence_tokens=64, batch_tokens=512, pass_tokens=256, report_steps=4
    )
    losses = []
    for device in (DEVICE, DEVICE, "cpu"):
        policy = Policy(SPARSE, seed=0).to(device)
        trainer = Midtrainer(
            Learner(policy, OptimizerConfig()), config, MidtrainCorpora(corpus, corpus), seed=0
        )
        trainer.run(0.0)
        losses.append(trainer.losses)
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(losses[2], abs=1e-3)
