"""Corrections, losses, KL and estimators against vectors made from public implementations."""

import json
from pathlib import Path

import pytest
import torch

from penstock.actors.trainer.config import REJECTIONS, KlConfig, LossConfig
from penstock.actors.trainer.objective.advantages import dr_grpo, grpo, rloo
from penstock.actors.trainer.objective.corrections import correction_weights
from penstock.actors.trainer.objective.kl import entropies, k1, k3, reward_changes
from penstock.actors.trainer.objective.losses import (
    LossTokens,
    corrected_ratios,
    normalizer,
    token_losses,
)
from penstock.actors.trainer.objective.mismatch import RatioSums
from penstock.actors.trainer.objective.ratios import Ratios, log_ratios

VECTORS = json.loads(Path(__file__).with_name("objectives").joinpath("vectors.json").read_text())
VERL, TRL, SLIME = VECTORS["verl"], VECTORS["trl"], VECTORS["slime"]
MASK = torch.tensor(VECTORS["given"]["mask"], dtype=torch.bool)
IDS = MASK.nonzero()[:, 0]
CLOSE = {"rel": 1e-6, "abs": 1e-9}


def flat(rows):
    return torch.tensor(rows, dtype=torch.float64)[MASK]


def given(name):
    return flat(VECTORS["given"][name])


def on_policy(log_ratio):
    return Ratios(log_ratio, log_ratio, torch.ones_like(log_ratio, dtype=torch.bool))


def weights_of(**settings):
    ratios = on_policy(log_ratios(given("proximal"), given("behavior")))
    return correction_weights(ratios, IDS, LossConfig(**settings)).tolist()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"correction": "token_tis"}, VERL["weights"]["token_tis"]),
        ({"correction": "sequence_tis"}, VERL["weights"]["sequence_tis"]),
        ({"correction": "sequence_mis"}, VERL["weights"]["sequence_mis"]),
        (
            {"correction": "geometric", "geometric_low": 0.9, "geometric_high": 1.1},
            VERL["weights"]["geometric"],
        ),
        ({"correction": "icepop", "ratio_low": 0.7, "ratio_high": 1.4}, SLIME["icepop"]),
    ],
)
def test_corrections_are_verls_and_slimes(settings, expected):
    weights = weights_of(**settings)
    assert weights == pytest.approx(flat(expected).tolist(), **CLOSE)
    assert len(set(weights)) > 1, "the vectors tell nothing"


@pytest.mark.parametrize("name", REJECTIONS[1:])
def test_rejections_are_verls(name):
    low, high = (0.8, 1.25) if name == "sequence_mean_k1" else (0.625, 1.6)
    nats_max = 0.3 if name.startswith(("sequence_sum", "sequence_max")) else 0.08
    weights = weights_of(
        correction="none",
        rejection=name,
        rejection_low=low,
        rejection_high=high,
        rejection_nats_max=nats_max,
    )
    kept = flat(VERL["kept"][name.replace("sequence", "seq")]).tolist()
    assert weights == kept
    assert 0 < sum(kept) < len(kept), "the vectors tell nothing"


def loss_and_gradient(**settings):
    """Return token losses, and the gradient of their sum."""
    config = LossConfig(clip_low=0.2, clip_high=0.28, **settings)
    current = given("current").requires_grad_()
    proximal, behavior = given("proximal"), given("behavior")
    ratios = on_policy(corrected_ratios(current, proximal, behavior, config))
    tokens = LossTokens(
        current=current,
        proximal=proximal,
        behavior=behavior,
        advantages=given("advantages"),
        weights=correction_weights(ratios, IDS, config),
        sequence_ids=IDS,
    )
    losses = token_losses(tokens, config)
    losses.values.sum().backward()
    assert losses.is_clipped.any() == (config.name != "policy_gradient")
    return float(losses.values.detach().sum()), current.grad, config


LOSSES = {
    "policy_gradient": {"name": "policy_gradient"},
    "ppo_clip": {"name": "ppo_clip", "correction": "none"},
    "ppo_dual_clip": {"name": "ppo_clip", "correction": "none", "dual_clip": 1.4},
    "cispo": {"name": "cispo", "correction": "none"},
    "decoupled_ppo": {"name": "decoupled_ppo"},
    "decoupled_dual_clip": {"name": "decoupled_ppo", "dual_clip": 1.4},
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_verls(name):
    loss, gradient, _ = loss_and_gradient(**LOSSES[name])
    expected = VERL["losses"][name]
    assert loss == pytest.approx(expected["loss"], **CLOSE)
    assert gradient.tolist() == pytest.approx(flat(expected["gradient"]).tolist(), **CLOSE)


def test_dual_clip_is_seen_in_the_vectors():
    assert VERL["losses"]["ppo_clip"]["loss"] != VERL["losses"]["ppo_dual_clip"]["loss"]


@pytest.mark.parametrize("expected", [VERL["losses"]["gspo"], TRL["gspo"]], ids=["verl", "trl"])
def test_gspo_is_verls_and_trls(expected):
    """Both take the mean over sequences: our divisor makes it of the sum."""
    loss, gradient, config = loss_and_gradient(name="gspo", correction="none")
    divisor = normalizer(len(MASK), config)
    # verl adds 1e-8 to a sequence's length, and TRL computes the advantages' mean in float32.
    assert loss / divisor == pytest.approx(expected["loss"], rel=1e-6)
    found = (gradient / divisor).tolist()
    assert found == pytest.approx(flat(expected["gradient"]).tolist(), rel=1e-6, abs=1e-9)


def test_trls_clip_and_its_k3():
    loss, gradient, config = loss_and_gradient(**LOSSES["ppo_clip"])
    size = MASK.numel()
    assert loss / size == pytest.approx(TRL["ppo_clip"]["loss"], **CLOSE)
    current = given("current").requires_grad_()
    penalty = KlConfig(where="loss", coefficient=0.05).coefficient * k3(current, given("reference"))
    penalty.sum().backward()
    total = (loss + float(penalty.detach().sum())) / size
    assert total == pytest.approx(TRL["k3"]["loss"], **CLOSE)
    expected = flat(TRL["k3"]["gradient"]).tolist()
    assert ((gradient + current.grad) / size).tolist() == pytest.approx(expected, **CLOSE)
    assert config.kl.where == "none"


def test_trls_cispo_has_an_upper_bound_alone():
    config = {"name": "cispo", "correction": "none"}
    current = given("current").requires_grad_()
    settings = LossConfig(clip_low=1.0, clip_high=0.28, **config)
    tokens = LossTokens(
        current=current,
        proximal=given("proximal"),
        behavior=given("behavior"),
        advantages=given("advantages"),
        weights=torch.ones_like(current),
        sequence_ids=IDS,
    )
    token_losses(tokens, settings).values.sum().backward()
    expected = flat(TRL["cispo"]["gradient"]).tolist()
    assert current.grad.tolist() == pytest.approx(expected, **CLOSE)


def test_kl_estimates_are_verls():
    behavior, reference = given("behavior"), given("reference")
    assert k1(behavior, reference).tolist() == pytest.approx(flat(VERL["k1"]).tolist(), **CLOSE)
    current = given("current").requires_grad_()
    loss = k3(current, reference).sum()
    loss.backward()
    assert float(loss.detach()) == pytest.approx(VERL["k3"]["loss"], **CLOSE)
    expected = flat(VERL["k3"]["gradient"]).tolist()
    assert current.grad.tolist() == pytest.approx(expected, **CLOSE)


def test_kl_in_the_reward_gives_verls_advantages():
    nats = torch.zeros(len(MASK), dtype=torch.float64)
    nats.index_add_(0, IDS, k1(given("behavior"), given("reference")))
    found = []
    for group in sorted(set(VECTORS["groups"])):
        at = [i for i, each in enumerate(VECTORS["groups"]) if each == group]
        rewards = [VECTORS["rewards"][i] for i in at]
        changes = reward_changes(rewards, [float(nats[i]) for i in at], 0.05, dr_grpo)
        found += [value + change for value, change in zip(dr_grpo(rewards), changes, strict=True)]
    assert found == pytest.approx(VERL["advantages_with_kl"], **CLOSE)


@pytest.mark.parametrize(
    ("estimate", "name"), [(dr_grpo, "dr_grpo"), (grpo, "grpo"), (rloo, "rloo")]
)
def test_estimators_are_verls(estimate, name):
    found = []
    for group in sorted(set(VECTORS["groups"])):
        pairs = zip(VECTORS["groups"], VECTORS["rewards"], strict=True)
        found += estimate([reward for each, reward in pairs if each == group])
    assert found == pytest.approx(VERL[name], **CLOSE)


def test_entropy_is_verls():
    found = entropies(torch.tensor(VERL["logits"], dtype=torch.float64)).tolist()
    assert found == pytest.approx(VERL["entropies"], rel=1e-6)


def test_mismatch_figures_are_verls():
    figures = RatioSums.of(log_ratios(given("proximal"), given("behavior"))).divergences("m")
    expected = VERL["offpolicy"]
    found = [figures["m_k1"], figures["m_k3"], figures["m_chi2"]]
    assert found == pytest.approx(
        [expected["kl"], expected["k3_kl"], expected["chi2_token"]], rel=1e-6
    )
