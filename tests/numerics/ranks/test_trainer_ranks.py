"""Several processes train to the bits of one."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
import torch
from tests.numerics.engine_rollouts import manifest_of, rollouts
from tests.numerics.ranks.steps import Steps, on_ranks
from tests.numerics.test_preference_losses import label, pair

from penstock.actors.policy.config import NumericsConfig, PolicyConfig
from penstock.actors.trainer.config import KlConfig, LossConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.preferences.config import PreferencesConfig

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
    manifests = [manifest_of(turns, step) for step in range(1, num_steps + 1)]
    return replace(made, manifests=manifests, turns=turns, examples=examples)


def take(world, steps):
    return steps.take(steps.ranked(world))


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_train_to_the_bits_of_one_process(num_ranks):
    steps = steps_of(UNEVEN, config_with())
    expected = steps.take(steps.local())
    for found in on_ranks(num_ranks, take, steps):
        assert found == expected


EXACT = msgspec.structs.replace(UNEVEN, num_experts=8, numerics=NumericsConfig(mode="exact"))
MXFP8 = msgspec.structs.replace(
    UNEVEN, tie_word_embeddings=True, numerics=NumericsConfig(expert_format="mxfp8")
)
NVFP4 = msgspec.structs.replace(UNEVEN, numerics=NumericsConfig(expert_format="nvfp4"))
DENSE = msgspec.structs.replace(UNEVEN, num_experts=0, num_experts_per_tok=0, intermediate_size=48)
EVERYTHING = config_with(
    num_passes=2,
    versions_kept=1,
    loss={"correction": "geometric", "kl": KlConfig(where="loss"), "entropy_bonus": 0.01},
    preferences=PreferencesConfig(live_weight=0.5),
    activation_checkpointing=True,
)
CASES = {
    "everything": (UNEVEN, EVERYTHING),
    "exact": (EXACT, config_with(loss={"kl": KlConfig(where="reward")})),
    "mxfp8": (MXFP8, config_with()),
    "nvfp4": (NVFP4, config_with()),
    "dense": (DENSE, config_with()),
}


@pytest.mark.parametrize("case", CASES)
def test_every_setting_has_the_same_bits(case):
    examples = [pair(), label(True), pair(), label(False, 0.5), label(True)]
    steps = steps_of(*CASES[case], examples=examples if case == "everything" else ())
    expected = steps.take(steps.local())
    assert not any(result.skipped for result in expected)
    for found in on_ranks(2, take, steps):
        assert found == expected
