"""What a step compares and how often: two factors of mismatch, a reference, several passes."""

import math

import msgspec
import numpy as np
import pytest
import torch
from tests.numerics.engine_rollouts import SPARSE, manifest_of, rollouts

from penstock.actors.trainer.config import (
    ESTIMATORS,
    KlConfig,
    LossConfig,
    OptimizerConfig,
    TrainerConfig,
)
from penstock.actors.trainer.learner import Learner, published
from penstock.actors.trainer.objective.advantages import estimator
from penstock.actors.trainer.reference import logprobs_under
from penstock.actors.trainer.sequences import training_sequence
from penstock.actors.trainer.step import train_step
from penstock.kernels.arrays import from_array, to_array

FAST = OptimizerConfig(learning_rate=3e-3, warmup_steps=0)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def learner():
    learner = Learner.initialized(SPARSE, FAST, seed=1)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.mul_(3.0)  # far from uniform, so that an error would show
    learner.versions.reference = published(learner.parameters)
    return learner


def config_with(num_passes=1, versions_kept=None, optimizer=FAST, **loss):
    return TrainerConfig(
        loss=LossConfig(token_denominator=8.0, **loss),
        optimizer=optimizer,
        num_passes=num_passes,
        versions_kept=versions_kept,
    )


def copy_of(learner):
    return {name: tensor.clone() for name, tensor in learner.state().items()}


@pytest.mark.parametrize("correction", ["geometric", "icepop"])
@pytest.mark.parametrize("versions_kept", [0, None])
async def test_narrow_bounds_are_for_the_engine_and_not_for_staleness(
    learner, correction, versions_kept
):
    """`geometric` masked 73% of the quickstart's tokens for being up to two versions old."""
    narrow = {"ratio_low": 0.999, "ratio_high": 1.001, "correction": correction}
    config = config_with(versions_kept=versions_kept, **narrow)
    turns = await rollouts(learner)
    first = train_step(learner, manifest_of(turns), turns, config).metrics
    assert first["mismatch_engine_measured"] == 1.0
    assert (first["mismatch_staleness_k3"], first["masked_fraction"]) == (0.0, 0.0)
    stale = train_step(learner, manifest_of(turns, step=2), turns, config).metrics
    assert stale["mismatch_k3"] > 1e-4, "the policy has moved"
    assert stale["mismatch_staleness_k3"] == pytest.approx(stale["mismatch_k3"], rel=1e-3)
    assert stale["mismatch_engine_measured"] == (versions_kept is None)
    assert abs(stale["mismatch_engine_k3"]) < 1e-9
    assert stale["masked_fraction"] == 0.0
    assert stale["ess"] < 1.0, "staleness has its weight"


@pytest.mark.parametrize("correction", ["geometric", "icepop"])
async def test_an_engine_that_computes_otherwise_is_masked_however_old(learner, correction):
    config = config_with(versions_kept=1, correction=correction)
    turns = await rollouts(learner)
    wrong = {
        name: [
            msgspec.structs.replace(
                turn, behavior_logprobs=to_array(from_array(turn.behavior_logprobs) - 2.0)
            )
            for turn in each
        ]
        if name in {"r0", "r1"}
        else each
        for name, each in turns.items()
    }
    for step in (1, 2):
        metrics = train_step(learner, manifest_of(turns, step), wrong, config).metrics
        assert metrics["masked_fraction"] == 0.5
        assert metrics["mismatch_engine_k1"] == pytest.approx(-1.0, abs=1e-3)


async def test_kept_versions_survive_a_checkpoint(learner):
    config = config_with(versions_kept=1, correction="geometric")
    turns = await rollouts(learner)
    train_step(learner, manifest_of(turns), turns, config)
    resumed = Learner.initialized(SPARSE, FAST, seed=2)
    resumed.load_state(copy_of(learner))
    resumed.versions.reference = learner.versions.reference
    assert list(resumed.versions.recent) == [0]
    expected = train_step(learner, manifest_of(turns, step=2), turns, config)
    assert train_step(resumed, manifest_of(turns, step=2), turns, config) == expected
    assert list(learner.versions.recent) == [1]


async def test_off_the_runs_path_nothing_is_said_of_the_engine(learner):
    turns = await rollouts(learner)
    learner.versions.have_sampled = False
    metrics = train_step(learner, manifest_of(turns), turns, config_with(versions_kept=1)).metrics
    assert (metrics["mismatch_engine_measured"], metrics["mismatch_engine_k3"]) == (0.0, 0.0)


async def test_passes_are_optimizer_steps_over_the_same_batch(learner):
    turns = await rollouts(learner)
    state = copy_of(learner)
    manifest = manifest_of(turns)
    for _ in range(3):
        apart = train_step(learner, manifest, turns, config_with(correction="none"))
    learner.load_state(state)
    together = train_step(learner, manifest, turns, config_with(num_passes=3, correction="none"))
    assert together.weights_digest == apart.weights_digest
    assert together.optimizer_digest == apart.optimizer_digest
    assert together.metrics["passes_k3"] > 1e-5
    assert together.metrics["tokens_trained"] == 4 * 27


async def test_decoupled_ppo_clips_what_the_passes_do_and_corrects_what_was_before(learner):
    turns = await rollouts(learner)
    train_step(learner, manifest_of(turns), turns, config_with())
    state = copy_of(learner)
    stale = manifest_of(turns, step=2)
    one = train_step(learner, stale, turns, config_with(correction="token_tis"))
    learner.load_state(state)
    decoupled = {"name": "decoupled_ppo", "clip_low": 0.01, "clip_high": 0.01}
    same = train_step(learner, stale, turns, config_with(**decoupled))
    assert same.weights_digest == one.weights_digest, "in one pass it is the corrected gradient"
    assert same.metrics["clipped_fraction"] == 0.0
    learner.load_state(state)
    several = train_step(learner, stale, turns, config_with(num_passes=3, **decoupled))
    assert several.metrics["clipped_fraction"] > 0.1
    learner.load_state(state)
    wide = {**decoupled, "clip_low": 1.0, "clip_high": 100.0}
    unclipped = train_step(learner, stale, turns, config_with(num_passes=3, **wide))
    assert several.metrics["passes_k3"] < unclipped.metrics["passes_k3"]


async def test_a_pass_that_is_not_finite_undoes_those_before_it(learner):
    turns = await rollouts(learner)
    before = learner.weights_digest(), learner.optimizer_digest()
    wild = OptimizerConfig(learning_rate=1e37, warmup_steps=0)
    result = train_step(learner, manifest_of(turns), turns, config_with(2, optimizer=wild))
    assert "nan" in result.skipped
    assert (learner.weights_digest(), learner.optimizer_digest()) == before


def k1_by_rollout(learner, turns, config):
    """Return the sum of log(sampler / reference) over each rollout."""
    found = {}
    for name, each in turns.items():
        sequence = training_sequence(name, each, SPARSE, 0.0)
        (logprobs,) = logprobs_under(learner, learner.versions.reference, [sequence], config)
        found[name] = float((sequence.behavior_logprobs - logprobs).astype(np.float64).sum())
    return found


@pytest.mark.parametrize("name", ESTIMATORS)
async def test_k1_comes_off_the_reward_before_the_groups_baseline(learner, name):
    """The step equals one whose manifest has the advantages worked out by hand."""
    config = config_with(correction="none", kl=KlConfig(where="reward", coefficient=0.2))
    config = msgspec.structs.replace(config, estimator=name)
    other = Learner.initialized(SPARSE, FAST, seed=3)
    learner.versions.reference = published(other.parameters)
    turns = await rollouts(learner)
    state, nats = copy_of(learner), k1_by_rollout(learner, turns, config)
    (group,) = manifest_of(turns).groups

    def credited(rewards):
        values = estimator(name)(rewards)
        samples = [
            msgspec.structs.replace(sample, advantage=value)
            for sample, value in zip(group.samples, values, strict=True)
        ]
        groups = [msgspec.structs.replace(group, samples=samples)]
        return msgspec.structs.replace(manifest_of(turns), groups=groups)

    manifest = credited([sample.reward for sample in group.samples])
    by_hand = credited([sample.reward - 0.2 * nats[sample.rollout_id] for sample in group.samples])
    found = train_step(learner, manifest, turns, config).metrics
    learner.load_state(state)
    expected = train_step(learner, by_hand, turns, config_with(correction="none")).metrics
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert found["kl_reference"] > 0.1


async def test_k3_in_the_loss_holds_the_policy_back(learner):
    turns = await rollouts(learner)
    state, moved = copy_of(learner), {}
    for coefficient in (0.0, 20.0):
        learner.load_state(state)
        kl = KlConfig(where="loss", coefficient=coefficient)
        for step in (1, 2, 3, 4):
            config = config_with(correction="none", kl=kl)
            metrics = train_step(learner, manifest_of(turns, step), turns, config).metrics
            if step == 1:
                assert abs(metrics["kl_reference"]) < 1e-4, "the policy is version 0 yet"
        moved[coefficient] = metrics["kl_reference_k3"]
    assert moved[20.0] < 0.5 * moved[0.0]


async def test_without_a_reference_a_penalty_is_refused_and_nothing_else(learner):
    turns = await rollouts(learner)
    learner.versions.reference = None
    assert (
        "kl_reference" not in train_step(learner, manifest_of(turns), turns, config_with()).metrics
    )
    with pytest.raises(ValueError, match=r"trainer\.loss\.kl: the weights of version 0"):
        train_step(learner, manifest_of(turns, 2), turns, config_with(kl=KlConfig(where="reward")))


async def test_entropy_is_measured_and_its_bonus_raises_it(learner):
    turns = await rollouts(learner)
    state, entropy = copy_of(learner), {}
    for bonus in (0.0, 1.0):
        learner.load_state(state)
        for step in (1, 2, 3):
            config = config_with(correction="none", entropy_bonus=bonus)
            metrics = train_step(learner, manifest_of(turns, step), turns, config).metrics
        entropy[bonus] = metrics["entropy"]
    assert 0.0 < entropy[0.0] < entropy[1.0] < math.log(96)
