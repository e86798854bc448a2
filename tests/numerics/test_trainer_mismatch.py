"""The trainer's logprobs against those that a real engine sampled with."""

import msgspec
import pytest
import torch
from tests.numerics.engine_rollouts import SPARSE, manifest_of, rollouts

from penstock.actors.policy.layers import TransformerLayer
from penstock.actors.trainer.config import LossConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.routes import StaleRoutesError
from penstock.actors.trainer.step import train_step
from penstock.messages.task import Sampling

DENSE = msgspec.structs.replace(
    SPARSE, num_experts=0, num_experts_per_tok=0, intermediate_size=80, tie_word_embeddings=False
)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=[SPARSE, DENSE], ids=["sparse", "dense"])
def learner(request):
    learner = Learner.initialized(request.param, TrainerConfig().optimizer, seed=1)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.mul_(3.0)  # far from uniform, so that an error would show
    return learner


def config_with(**loss):
    return TrainerConfig(loss=LossConfig(**loss))


async def test_on_policy_the_trainer_agrees_with_the_engine(learner):
    turns = await rollouts(learner)
    metrics = train_step(learner, manifest_of(turns), turns, config_with()).metrics
    assert metrics["tokens_trained"] == 4 * 27
    assert metrics["router_mismatch"] == 0.0
    sealed = sum(len(part) for each in turns.values() for t in each for part in t.route_segments)
    assert metrics["route_bytes"] == sealed
    assert (sealed == 0) == learner.policy.config.is_dense
    assert abs(metrics["mismatch_k1"]) < 1e-5
    assert 0 <= metrics["mismatch_k3"] < 1e-9
    assert metrics["ess"] > 0.999999


async def test_a_wrong_temperature_or_an_older_policy_shows_as_mismatch(learner):
    turns = await rollouts(learner)
    wrong = {
        name: [msgspec.structs.replace(turn, sampling=Sampling()) for turn in each]
        for name, each in turns.items()
    }
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    metrics = train_step(learner, manifest_of(turns), wrong, config_with()).metrics
    assert metrics["mismatch_k3"] > 1e-3
    learner.load_state(state)
    train_step(learner, manifest_of(turns), turns, config_with())
    later = train_step(learner, manifest_of(turns, step=2), turns, config_with())
    assert later.metrics["mismatch_k3"] > 1e-9
    assert later.metrics["staleness_max"] == 1
    assert later.staleness_tokens == {1: 4 * 27}


async def test_a_step_makes_rewarded_turns_likelier(learner):
    turns = await rollouts(learner)
    good = {name: turns[name] for name in ("r1", "r3")}
    losses = []
    for step in range(1, 9):
        train_step(learner, manifest_of(turns, step), turns, config_with())
        probe = Learner.initialized(learner.policy.config, TrainerConfig().optimizer, seed=1)
        probe.load_state(learner.state())
        losses.append(
            train_step(probe, manifest_of(good), good, config_with()).metrics["logprob_mean"]
        )
    assert losses[-1] > losses[0]


async def test_micro_batches_change_sums_only_by_rounding(learner):
    turns = await rollouts(learner)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    whole = train_step(learner, manifest_of(turns), turns, config_with())
    learner.load_state(state)
    again = train_step(learner, manifest_of(turns), turns, config_with())
    assert again == whole, "the same inputs give the same bits"
    learner.load_state(state)
    config = TrainerConfig(micro_batch_tokens=50)
    cut = train_step(learner, manifest_of(turns), turns, config)
    for name in ("loss", "grad_norm", "mismatch_k3"):
        assert cut.metrics[name] == pytest.approx(whole.metrics[name], rel=1e-4, abs=1e-7)


async def test_activations_computed_again_give_the_same_bits(learner, monkeypatch):
    turns = await rollouts(learner, 2)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    kept = train_step(learner, manifest_of(turns), turns, config_with())
    learner.load_state(state)
    num_calls = []
    run = TransformerLayer.forward
    monkeypatch.setattr(
        TransformerLayer, "forward", lambda *args: num_calls.append(1) or run(*args)
    )
    again = train_step(
        learner, manifest_of(turns), turns, TrainerConfig(activation_checkpointing=True)
    )
    num_passes = len(num_calls) / learner.policy.config.num_hidden_layers
    assert num_passes == 2, "forward, and again in the backward pass"
    assert again.weights_digest == kept.weights_digest


async def test_missing_or_foreign_turns_are_refused(learner):
    turns = await rollouts(learner, 2)
    manifest = manifest_of(turns)
    if learner.policy.config.is_dense:
        other = await rollouts(Learner.initialized(SPARSE, TrainerConfig().optimizer, seed=1), 2)
        with pytest.raises(StaleRoutesError, match="rollout r0: routes of a model with experts"):
            train_step(learner, manifest, other, config_with())
        return
    with pytest.raises(ValueError, match="rollout r0: a turn without routes"):
        cut = {**turns, "r0": [*turns["r0"][:2], without_routes(turns["r0"][2])]}
        train_step(learner, manifest, cut, config_with())
    with pytest.raises(ValueError, match=r"manifest counts 27 tokens, its turns have 18"):
        train_step(learner, manifest, {**turns, "r0": turns["r0"][:2]}, config_with())
    with pytest.raises(KeyError):
        train_step(learner, manifest, {"r0": turns["r0"]}, config_with())


def without_routes(turn):
    return msgspec.structs.replace(turn, route_segments=[])


async def test_the_number_of_workers_changes_no_bit(learner):
    turns = await rollouts(learner, 6)
    state = {name: tensor.clone() for name, tensor in learner.state().items()}
    results = []
    for num_workers in (1, 2, 3):
        learner.load_state(state)
        config = TrainerConfig(micro_batch_tokens=50, num_workers=num_workers)
        results.append(train_step(learner, manifest_of(turns), turns, config))
    assert results[0] == results[1] == results[2]
