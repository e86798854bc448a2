"""Estimators, corrections, losses and metrics against their formulas in plain float64."""

import math
import statistics

import numpy as np
import pytest
import torch

from penstock.actors.trainer.config import LiveConfig, LossConfig
from penstock.actors.trainer.objective.advantages import dr_grpo, grpo, rloo
from penstock.actors.trainer.objective.corrections import correction_weights
from penstock.actors.trainer.objective.live_baseline import LiveBaseline
from penstock.actors.trainer.objective.losses import LossTokens, normalizer, token_losses
from penstock.actors.trainer.objective.mismatch import MismatchSums
from penstock.actors.trainer.objective.ratios import Ratios, log_ratios
from penstock.messages.reward import Outcome
from penstock.messages.training import SampleEntry

REWARDS = [1.0, 0.0, 0.25, 1.0, -0.5]


def test_dr_grpo():
    mean = statistics.fmean(REWARDS)
    assert dr_grpo(REWARDS) == pytest.approx([r - mean for r in REWARDS], abs=1e-15)
    assert dr_grpo([0.5]) == [0.0]


def test_grpo():
    mean, std = statistics.fmean(REWARDS), statistics.stdev(REWARDS)
    assert grpo(REWARDS) == pytest.approx([(r - mean) / (std + 1e-6) for r in REWARDS], abs=1e-12)
    assert grpo([1.0, 1.0]) == [0.0, 0.0]
    assert grpo([0.5]) == [0.0]
    assert grpo([1.0, 0.0]) == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=1e-5)


def test_rloo():
    expected = [r - statistics.fmean(REWARDS[:i] + REWARDS[i + 1 :]) for i, r in enumerate(REWARDS)]
    assert rloo(REWARDS) == pytest.approx(expected, abs=1e-15)
    assert rloo([3.0]) == [0.0]


def entry(reward, tenant="t"):
    return SampleEntry(
        rollout_id="r", outcome=Outcome.SOLVED, reward=reward, advantage=0.0,
        version_spans=[], tenant=tenant,
    )  # fmt: skip


CONFIG = LiveConfig(baseline_momentum=0.5, baseline_num_prior=2.0)


def advantages_of(baseline, *entries):
    return [credited.advantage for credited in baseline.credit(entries, CONFIG)]


def test_the_live_baseline_is_the_mean_of_the_others_shrunk_to_the_whole():
    baseline = LiveBaseline()
    assert advantages_of(baseline, entry(1.0)) == [0.5], "a sample alone is not used up for nothing"
    batch = [entry(1.0, "a"), entry(0.0, "a"), entry(1.0, "b")]
    whole = [(0.0 + 1.0 + 0.5) / 3, (1.0 + 1.0 + 0.5) / 3, (1.0 + 0.0 + 0.5) / 3]
    own = [(0.0 + 2 * whole[0]) / 3, (1.0 + 2 * whole[1]) / 3, whole[2]]
    expected = [1.0 - own[0], 0.0 - own[1], 1.0 - own[2]]
    assert advantages_of(baseline, *batch) == pytest.approx(expected, abs=1e-15)
    baseline.add(batch, CONFIG)
    assert advantages_of(baseline, *batch) != pytest.approx(expected)
    rewards, num = 1.0 + 0.5 * (0.0 + 0.5 * 1.0), 1.0 + 0.5 * (1.0 + 0.5)
    whole_c = (rewards + 0.5) / (num + 1.0)
    assert advantages_of(baseline, entry(1.0, "c")) == pytest.approx([1.0 - whole_c], abs=1e-15)
    own_b = (1.0 + 2 * whole_c) / (1.0 + 2.0)
    assert advantages_of(baseline, entry(0.0, "b")) == pytest.approx([-own_b], abs=1e-15)


def test_a_sample_has_no_part_in_its_own_baseline():
    """Or REINFORCE would be biased: its baseline must not depend on what was drawn."""
    others = [entry(1.0), entry(0.0), entry(1.0, "b")]
    baselines = [
        reward - advantages_of(LiveBaseline(), entry(reward), *others)[0]
        for reward in (0.0, 0.3, 1.0)
    ]
    assert baselines == pytest.approx([baselines[0]] * 3)


LENGTHS = [3, 1, 4]
IDS = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2])


def on_policy(log_ratio):
    """Ratios without staleness: all of them are the engine's."""
    return Ratios(log_ratio, log_ratio, torch.ones_like(log_ratio, dtype=torch.bool))


def tokens_of(current, behavior, advantages, weights, ids=None):
    return LossTokens(
        current=current,
        proximal=current.detach(),
        behavior=behavior,
        advantages=advantages,
        weights=weights,
        sequence_ids=torch.zeros(len(current), dtype=torch.int64) if ids is None else ids,
    )


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
    ratios = on_policy(log_ratios(proximal, behavior))
    weights = correction_weights(ratios, IDS, LossConfig(correction=name))
    expected = [EXPECTED[name](r, s) for s in ratios_by_sequence() for r in s]
    assert weights.tolist() == pytest.approx(expected, rel=1e-12)


def test_geometric_keeps_a_sequence_close_to_the_sampler():
    log_ratio = torch.tensor([0.5, -0.5004, 0.5], dtype=torch.float64)
    weights = correction_weights(
        on_policy(log_ratio), torch.tensor([0, 0, 1]), LossConfig(correction="geometric")
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
    tokens = tokens_of(current, current.detach(), advantages, weights)
    loss = token_losses(tokens, LossConfig()).values.sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0.5 + 2.0 - 0.125)
    assert current.grad.tolist() == [-0.5, -1.0, 0.25]


@pytest.mark.parametrize("advantage", [1.5, -0.7])
@pytest.mark.parametrize("log_ratio", [-0.6, -0.1, 0.0, 0.1, 0.6])
def test_ppo_clip(advantage, log_ratio):
    config = LossConfig(name="ppo_clip", correction="none", clip_low=0.2, clip_high=0.28)
    current = torch.tensor([-1.0 + log_ratio], dtype=torch.float64, requires_grad=True)
    behavior, ones = torch.tensor([-1.0], dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    loss = token_losses(tokens_of(current, behavior, advantage * ones, ones), config).values.sum()
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
    is_measured = np.arange(8) != 4
    engine = np.where(is_measured, log_r / 4, 0.0)
    sums = MismatchSums.empty()
    for part in (slice(0, 3), slice(3, 8)):
        ratios = Ratios(*(torch.tensor(each[part]) for each in (log_r, engine, is_measured)))
        sums.add(MismatchSums.of(ratios, torch.tensor(weights[part])))
    figures = sums.figures()
    parts = {"engine": engine[is_measured], "staleness": log_r - engine}
    assert figures == pytest.approx(
        {
            "mismatch_k1": np.mean(-log_r),
            "mismatch_k3": np.mean(ratio - 1 - log_r),
            "mismatch_chi2": np.mean(ratio**2) - 1,
            "ess": 1 / np.mean((weights / weights.mean()) ** 2),
            "masked_fraction": np.mean(weights == 0),
            "perplexity_ratio": np.exp(-proximal.mean()) / np.exp(-behavior.mean()),
            "mismatch_engine_measured": 7 / 8,
            "ratio_mean": ratio.mean(),
            "ratio_min": ratio.min(),
            "ratio_max": ratio.max(),
            "ratio_ess": ratio.mean() ** 2 / np.mean(ratio**2),
        }
        | {f"mismatch_{name}_k1": np.mean(-part) for name, part in parts.items()}
        | {f"mismatch_{name}_k3": np.mean(np.exp(part) - 1 - part) for name, part in parts.items()}
        | {f"mismatch_{name}_chi2": np.mean(np.exp(2 * part)) - 1 for name, part in parts.items()},
        rel=1e-12,
    )


def test_mismatch_of_no_token_is_that_of_equal_policies():
    figures = MismatchSums.empty().figures()
    assert (figures["mismatch_k3"], figures["mismatch_chi2"], figures["ess"]) == (0.0, 0.0, 1.0)
