"""Estimators, corrections, losses and metrics against their formulas in plain float64."""

import math
import statistics

import numpy as np
import pytest
import torch

from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.advantages import RunningBaseline, dr_grpo, grpo, rloo
from penstock.actors.trainer.objective.losses import (
    correction_weights,
    log_ratios,
    normalizer,
    token_losses,
)
from penstock.actors.trainer.objective.mismatch import MismatchSums, mismatch_sums

REWARDS = [1.0, 0.0, 0.25, 1.0, -0.5]


def test_dr_grpo():
    mean = statistics.fmean(REWARDS)
    assert dr_grpo(REWARDS) == pytest.approx([r - mean for r in REWARDS], abs=1e-15)
    assert dr_grpo([0.5]) == [0.0]


def test_grpo():
    mean, std = statistics.fmean(REWARDS), statistics.pstdev(REWARDS)
    assert grpo(REWARDS) == pytest.approx([(r - mean) / (std + 1e-6) for r in REWARDS], abs=1e-12)
    assert grpo([1.0, 1.0]) == [0.0, 0.0]


def test_rloo():
    expected = [r - statistics.fmean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    assert rloo(REWARDS) == pytest.approx(expected, abs=1e-15)
    assert rloo([3.0]) == [0.0]


def test_running_baseline_averages_first_and_forgets_later():
    baseline = RunningBaseline(momentum=0.5)
    assert baseline.advantage(1.0) == 0.0
    baseline = baseline.after([1.0])
    assert (baseline.value, baseline.advantage(0.0)) == (1.0, -1.0)
    baseline = baseline.after([0.0, 1.0])
    assert baseline.value == pytest.approx(0.5 * 0.5 + 0.5 * 1.0)
    assert baseline.num_samples == 3
    assert baseline == RunningBaseline(momentum=0.5).after([1.0, 0.0, 1.0])


LENGTHS = [3, 1, 4]
IDS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])


def random_logprobs():
    rng = np.random.default_rng(3)
    behavior = -rng.exponential(1.5, 8)
    return behavior + rng.normal(0, 0.7, 8), behavior


def ratios_by_sequence():
    proximal, behavior = random_logprobs()
    ratios = [math.exp(p - b) for p, b in zip(proximal, behavior, strict=True)]
    return [ratios[:3], ratios[3:4], ratios[4:]]


EXPECTED = {
    "none": lambda r, s: 1.0,
    "token_tis": lambda r, s: min(r, 2.0),
    "sequence_tis": lambda r, s: min(math.prod(s), 2.0),
    "icepop": lambda r, s: r if 0.5 <= r <= 5.0 else 0.0,
    "sequence_mis": lambda r, s: math.prod(s) if 0.5 <= math.prod(s) <= 2.0 else 0.0,
    "geometric": lambda r, s: float(0.999 <= math.prod(s) ** (1 / len(s)) <= 1.001),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_corrections(name):
    proximal, behavior = (torch.tensor(values) for values in random_logprobs())
    weights = correction_weights(log_ratios(proximal, behavior), IDS, LossConfig(correction=name))
    expected = [EXPECTED[name](r, s) for s in ratios_by_sequence() for r in s]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)


def test_geometric_keeps_a_sequence_close_to_the_sampler():
    log_ratio = torch.tensor([0.5, -0.5004, 0.5], dtype=torch.float64)
    weights = correction_weights(
        log_ratio, torch.tensor([0, 0, 1]), LossConfig(correction="geometric")
    )
    assert weights.tolist() == [1.0, 1.0, 0.0]


def test_log_ratios_are_clamped_and_carry_no_gradient():
    proximal = torch.tensor([0.0, -100.0], requires_grad=True)
    ratio = log_ratios(proximal, torch.tensor([-100.0, 0.0]))
    assert ratio.tolist() == [20.0, -20.0]
    assert not ratio.requires_grad


def test_policy_gradient_has_reinforces_gradient():
    current = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.5, 0.5, -1.0], dtype=torch.float64)
    weights = torch.tensor([1.0, 2.0, 0.25], dtype=torch.float64)
    loss = token_losses(current, current.detach(), advantages, weights, LossConfig()).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5 + 2.0 - 0.125)
    assert current.grad.tolist() == [-0.5, -1.0, 0.25]


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("log_ratio", [-0.6, -0.1, 0.0, 0.1, 0.6])
def test_ppo_clip(advantage, log_ratio):
    config = LossConfig(name="ppo_clip", correction="none", clip_low=0.2, clip_high=0.28)
    current = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    behavior, ones = torch.tensor([-1.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss = token_losses(current, behavior, advantage * ones, ones, config).sum()
    loss.backward()
    ratio = math.exp(log_ratio)
    clipped = min(max(ratio, 0.8), 1.28)
    assert float(loss.detach()) == pytest.approx(-min(ratio * advantage, clipped * advantage))
    is_cut = clipped * advantage < ratio * advantage
    assert float(current.grad) == pytest.approx(0.0 if is_cut else -ratio * advantage)


def test_the_denominator_does_not_depend_on_lengths():
    assert normalizer(8, LossConfig(token_denominator=100)) == 800
    assert normalizer(0, LossConfig(token_denominator=100)) == 100


def test_mismatch_metrics_over_micro_batches():
    proximal, behavior = random_logprobs()
    log_r = proximal - behavior
    ratio = np.exp(log_r)
    weights = np.where(ratio > 5, 0.0, np.minimum(ratio, 2.0))
    weights[2] = 0.0
    sums = MismatchSums()
    for part in (slice(0, 3), slice(3, 8)):
        sums.add(mismatch_sums(torch.tensor(log_r[part]), torch.tensor(weights[part])))
    figures = sums.figures()
    assert figures == pytest.approx(
        {
            "mismatch_k1": np.mean(-log_r),
            "mismatch_k3": np.mean(ratio - 1 - log_r),
            "mismatch_chi2": np.mean(ratio**2) - 1,
            "ess": 1 / np.mean((weights / weights.mean()) ** 2),
            "masked_fraction": np.mean(weights == 0),
            "perplexity_ratio": np.exp(-proximal.mean()) / np.exp(-behavior.mean()),
        },
        rel=1e-12,
    )


def test_mismatch_of_no_token_is_that_of_equal_policies():
    figures = MismatchSums().figures()
    assert (figures["mismatch_k3"], figures["mismatch_chi2"], figures["ess"]) == (0.0, 0.0, 1.0)
