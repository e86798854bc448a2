"""Several processes train to the bits of one."""

import asyncio
import math
import os
from dataclasses import replace

import msgspec
import pytest
import torch
import torch.distributed as dist
from tests.numerics.engine_rollouts import manifest_of, rollouts
from tests.numerics.ranks.steps import DIED, Steps, on_ranks
from tests.numerics.test_preference_losses import label, pair

from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.trainer.batching.manifests import with_num_inputs
from penstock.actors.trainer.config import KlConfig, LossConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.off_policy import measure
from penstock.actors.trainer.preferences.config import PreferencesConfig
from penstock.actors.trainer.sequences import check_trajectory

pytestmark = pytest.mark.timeout(300)

UNEVEN = PolicyConfig(
    vocab_size=97,
    hidden_size=32,
    num_hidden_layers=2,
    head_dim=16,
    num_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
)
"""Rows that neither 2 nor 4 ranks share evenly; of 4 ranks the last has no expert."""
OPTIMIZER = OptimizerConfig(learning_rate=3e-3, warmup_steps=0, weight_decay=0.01, grad_clip=0.1)


def config_with(**changes):
    loss = LossConfig(token_denominator=8.0, **changes.pop("loss", {}))
    return TrainerConfig(loss=loss, optimizer=OPTIMIZER, micro_batch_tokens=60, **changes)


def steps_of(policy, config, *, examples=(), num_rollouts=5, num_steps=3):
    """Steps over rollouts of two turns and more, each a micro-batch of its own."""
    made = Steps(policy=policy, config=config, manifests=[], turns={})
    turns = asyncio.run(rollouts(made.local(), num_rollouts))
    lengths = {name: check_trajectory(name, each, policy) for name, each in turns.items()}
    manifests = [
        with_num_inputs(manifest_of(turns, step), lengths) for step in range(1, num_steps + 1)
    ]
    return replace(made, manifests=manifests, turns=turns, examples=examples)


def take(world, cases):
    return {name: taken(steps, steps.ranked(world), world) for name, steps in cases.items()}


def taken(steps, learner, world=None):
    """Return the steps' results, and how far the policy is from the one that sampled."""
    results = steps.take(learner, world)
    manifest = steps.manifests[-1]
    turns = steps.read(manifest, world)
    return results, measure(learner, manifest.groups[0].samples, turns, steps.config)


def take_in_another_order(world, steps):
    send = dist.all_to_all_single

    def reversed_ranks(received, sent, group):
        send(received, sent, group=group)
        received.copy_(received.view(world.num_ranks, -1).flip(0).flatten())

    dist.all_to_all_single = reversed_ranks
    try:
        return steps.take(steps.ranked(world))
    finally:
        dist.all_to_all_single = send


def load(world, steps, whole):
    """Load whole tensors, go back to a copy of the rank's own, and return the digests of both."""
    learner = steps.ranked(world)
    own = {name: tensor.clone() for name, tensor in learner.state().items()}
    learner.load_state(whole)
    loaded = digests(learner), sorted(learner.versions.recent)
    learner.load_state(own)
    return loaded, digests(learner)


def digests(learner):
    return learner.weights_digest(), learner.optimizer_digest()


def take_all(world, cases, whole):
    """One start for all: starting processes takes longer than the steps."""
    return (
        take(world, cases),
        take_in_another_order(world, cases["plain"]),
        load(world, cases["comparing"], whole),
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


EXACT = msgspec.structs.replace(UNEVEN, num_experts=8, numerics=NumericsConfig(mode="exact"))
MXFP8 = msgspec.structs.replace(
    UNEVEN, tie_word_embeddings=True, numerics=NumericsConfig(expert_format="mxfp8")
)
NVFP4 = msgspec.structs.replace(UNEVEN, numerics=NumericsConfig(expert_format="nvfp4"))
DENSE = msgspec.structs.replace(UNEVEN, num_experts=0, num_experts_per_tok=0, intermediate_size=48)
CASES = {
    "plain": (UNEVEN, config_with()),
    "comparing": (
        UNEVEN,
        config_with(
            num_passes=2,
            versions_kept=1,
            loss={"correction": "geometric", "kl": KlConfig(where="loss"), "entropy_bonus": 0.01},
            preferences=PreferencesConfig(live_weight=0.5),
            activation_checkpointing=True,
        ),
    ),
    "exact": (EXACT, config_with(loss={"kl": KlConfig(where="reward")})),
    "mxfp8": (MXFP8, config_with()),
    "nvfp4": (NVFP4, config_with()),
    "dense": (DENSE, config_with()),
    "skipped": (UNEVEN, config_with(num_passes=2)),
}


def steps_of_case(name):
    examples = [pair(), label(True), pair(), label(False, 0.5), label(True)]
    steps = steps_of(*CASES[name], examples=examples if name == "comparing" else ())
    if name == "skipped":
        steps.manifests[1].groups[0].samples[4] = msgspec.structs.replace(
            steps.manifests[1].groups[0].samples[4], advantage=math.inf
        )
    return steps


def test_two_ranks_train_to_the_bits_of_one_process_if_the_order_of_sums_is_the_same():
    cases = {name: steps_of_case(name) for name in ("plain", "comparing")}
    learners = {name: steps.local() for name, steps in cases.items()}
    first = digests(learners["comparing"])
    expected = {name: taken(steps, learners[name]) for name, steps in cases.items()}
    (plain, *_), _ = expected["plain"]
    assert not plain.skipped
    trained = learners["comparing"]
    for found, in_another_order, loaded in on_ranks(2, take_all, cases, trained.state()):
        assert found == expected
        assert in_another_order[0].weights_digest != plain.weights_digest
        assert in_another_order[0].metrics["loss"] == plain.metrics["loss"]
        assert loaded == ((digests(trained), [2]), first)


def die_in_mid_step(world, steps):
    send, num_sent = dist.all_to_all_single, iter(range(100))

    def send_or_die(*arguments, **named):
        if world.rank == 1 and next(num_sent) == 4:
            os._exit(9)
        return send(*arguments, **named)

    dist.all_to_all_single = send_or_die
    try:
        return steps.take(steps.ranked(world))
    except RuntimeError as error:
        return str(error)


@pytest.mark.slow
def test_the_others_fail_at_once_where_a_rank_dies_in_mid_step():
    first, second = on_ranks(2, die_in_mid_step, steps_of_case("plain"))
    assert "onnection" in first
    assert second == DIED


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_any_number_of_ranks_has_the_bits_of_one_process_at_any_setting(num_ranks):
    cases = {name: steps_of_case(name) for name in CASES}
    expected = {name: taken(steps, steps.local()) for name, steps in cases.items()}
    assert [each.skipped for each in expected["skipped"][0]] == ["", "the loss is inf", ""]
    for found in on_ranks(num_ranks, take, cases):
        assert found == expected
