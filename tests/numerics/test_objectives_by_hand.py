"""Each objective on a few tokens, worked out by hand: ratios are chosen, not drawn."""

import math

import pytest
import torch

from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.advantages import dr_grpo, grpo, rloo
from penstock.actors.trainer.objective.corrections import correction_weights
from penstock.actors.trainer.objective.kl import entropies, k1, k3, reward_changes
from penstock.actors.trainer.objective.losses import LossTokens, token_losses
from penstock.actors.trainer.objective.ratios import Ratios

IDS = torch.tensor([0, 0, 1])


def logs(*values):
    return torch.tensor([math.log(value) for value in values], dtype=torch.float64)


def ratios(engine, staleness, is_measured=(True, True, True)):
    """Two tokens of one sequence, one of another."""
    return Ratios(logs(*engine) + logs(*staleness), logs(*engine), torch.tensor(is_measured))


def weights(given, **settings):
    return correction_weights(given, IDS, LossConfig(**settings)).tolist()


def test_icepop_judges_the_engine_and_truncates_staleness():
    given = ratios(engine=(1.1, 6.0, 0.9), staleness=(3.0, 1.0, 0.5))
    # 1.1 min(3, 2); 6 is above 5: masked; 0.9 x 0.5.
    assert weights(given, correction="icepop") == pytest.approx([2.2, 0.0, 0.45])


def test_geometric_takes_the_mean_of_what_is_measured():
    bounds = {"correction": "geometric", "geometric_low": 0.9, "geometric_high": 1.1}
    given = ratios(engine=(1.21, 1.0, 1.05), staleness=(1.0, 3.0, 0.5))
    # sqrt(1.21 x 1) = 1.1 is kept, 1.05, too; staleness is min(s, 2).
    assert weights(given, **bounds) == pytest.approx([1.0, 2.0, 0.5])
    alone = ratios((1.21, 1.0, 1.05), (1.0, 3.0, 0.5), is_measured=(True, False, True))
    # The only token known of the first sequence has 1.21: masked.
    assert weights(alone, **bounds) == pytest.approx([0.0, 0.0, 0.5])


@pytest.mark.parametrize(
    ("rejection", "kept"),
    [
        ("token_k1", [1.0, 0.0, 1.0]),  # 0.8, 4, 1.5 in [0.5, 2]
        ("sequence_sum_k1", [0.0, 0.0, 1.0]),  # 3.2; 1.5
        ("sequence_mean_k1", [1.0, 1.0, 1.0]),  # sqrt(3.2) = 1.79; 1.5
        ("token_k2", [1.0, 0.0, 1.0]),  # 0.025, 0.961, 0.082 at most 0.1
        ("sequence_mean_k2", [0.0, 0.0, 1.0]),  # 0.493; 0.082
        ("token_k3", [1.0, 0.0, 1.0]),  # 0.023, 1.614, 0.095
        ("sequence_sum_k3", [0.0, 0.0, 1.0]),  # 1.637; 0.095
        ("sequence_max_k3", [0.0, 0.0, 1.0]),  # 1.614; 0.095
    ],
)
def test_rejection(rejection, kept):
    given = ratios(engine=(0.8, 4.0, 1.5), staleness=(1.0, 1.0, 1.0))
    assert weights(given, correction="none", rejection=rejection) == kept


def losses(name, *, current, advantages, proximal=(1.0, 1.0, 1.0), **settings):
    """Return losses and gradients of tokens whose sampler gave each probability 1 / e."""
    behavior = torch.full((3,), -1.0, dtype=torch.float64)
    leaf = (behavior + logs(*current)).requires_grad_()
    tokens = LossTokens(
        current=leaf,
        proximal=behavior + logs(*proximal),
        behavior=behavior,
        advantages=torch.tensor(advantages, dtype=torch.float64),
        weights=torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64),
        sequence_ids=IDS,
    )
    correction = "token_tis" if name == "decoupled_ppo" else "none"
    found = token_losses(tokens, LossConfig(name=name, correction=correction, **settings))
    found.values.sum().backward()
    return found.values.detach().tolist(), leaf.grad.tolist(), found.is_clipped.tolist()


def test_dual_clip_bounds_what_a_bad_token_may_cost():
    given = {"current": (1.1, 1.5, 4.0), "advantages": (1.0, 1.0, -1.0)}
    values, gradients, is_clipped = losses("ppo_clip", **given)
    # 1.1; 1.5 cut to 1.2; 4 for a negative advantage is not cut, and has weight 1/2.
    assert values == pytest.approx([-1.1, -1.2, 2.0])
    assert gradients == pytest.approx([-1.1, 0.0, 2.0])
    assert is_clipped == [False, True, False]
    values, gradients, is_clipped = losses("ppo_clip", dual_clip=3.0, **given)
    assert values == pytest.approx([-1.1, -1.2, 1.5])
    assert gradients == pytest.approx([-1.1, 0.0, 0.0])
    assert is_clipped == [False, True, True]


def test_cispo_cuts_the_ratio_and_keeps_the_gradient():
    values, gradients, is_clipped = losses(
        "cispo", current=(1.1, 1.5, 0.5), advantages=(1.0, 1.0, -1.0)
    )
    # -r A log pi with r = 1.1, 1.2, 0.8 and log pi = -1 + log(1.1, 1.5, 0.5).
    logprobs = [-1 + math.log(r) for r in (1.1, 1.5, 0.5)]
    assert values == pytest.approx([-1.1 * logprobs[0], -1.2 * logprobs[1], 0.4 * logprobs[2]])
    assert gradients == pytest.approx([-1.1, -1.2, 0.4])
    assert is_clipped == [False, True, True]


def test_gspo_has_one_ratio_for_a_sequence():
    values, gradients, is_clipped = losses(
        "gspo", current=(1.44, 1.0, 1.1), advantages=(-1.0, -1.0, 2.0), token_denominator=10.0
    )
    # sqrt(1.44 x 1) = 1.2 for both, each 10 / 2; 1.1 for the other one, 10 / 1, half its weight.
    assert values == pytest.approx([6.0, 6.0, -11.0])
    assert gradients == pytest.approx([6.0, 6.0, -11.0])
    assert is_clipped == [False, False, False]


def test_decoupled_ppo_clips_around_the_proximal_policy():
    values, gradients, is_clipped = losses(
        "decoupled_ppo",
        current=(2.2, 2.0, 0.5),
        proximal=(2.0, 1.0, 1.0),
        advantages=(1.0, 1.0, -1.0),
    )
    # current / proximal = 1.1, 2 cut to 1.2, 0.5 cut to 0.8.
    assert values == pytest.approx([-1.1, -1.2, 0.4])
    assert gradients == pytest.approx([-1.1, 0.0, 0.0])
    assert is_clipped == [False, True, True]


def test_kl_estimates():
    policy, reference = logs(0.5, 0.25), logs(0.25, 0.5)
    assert k1(policy, reference).tolist() == pytest.approx([math.log(2), -math.log(2)])
    expected = [0.5 - 1 + math.log(2), 2 - 1 - math.log(2)]
    assert k3(policy, reference).tolist() == pytest.approx(expected)


def test_k1_in_the_reward_keeps_a_groups_sum():
    # Nats 3, 1, 2 have mean 2: whoever went further than the others pays 0.1 a nat.
    rewards, nats = [1.0, 0.0, 0.5], [3.0, 1.0, 2.0]
    assert reward_changes(rewards, nats, 0.1, dr_grpo) == pytest.approx([-0.1, 0.1, 0.0])
    assert reward_changes([1.0], [7.0], 0.1, dr_grpo) == [0.0]


def test_k1_in_the_reward_goes_through_the_estimator():
    # Against the mean of the two others: 3 - 1.5, 1 - 2.5, 2 - 2 nats.
    found = reward_changes([1.0, 0.0, 0.5], [3.0, 1.0, 2.0], 0.1, rloo)
    assert found == pytest.approx([-0.15, 0.15, 0.0])
    # Rewards 1, 0 become 0.5, 0: over their deviation both are alike.
    assert reward_changes([1.0, 0.0], [2.0, 0.0], 0.25, grpo) == pytest.approx([0, 0], abs=1e-5)


def test_entropy_of_what_could_be_drawn():
    logits = torch.tensor([[0.0, 0.0, -math.inf, 0.0], [5.0, -math.inf, -math.inf, -math.inf]])
    logits.requires_grad_()
    found = entropies(logits)
    assert found.detach().tolist() == pytest.approx([math.log(3), 0.0])
    found.sum().backward()
    assert logits.grad.isfinite().all()
