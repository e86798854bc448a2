"""DPO and KTO against TRL's own functions and against numbers worked out by hand."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.sim.trainer.conftest import POLICY, small_config

from penstock.actors.trainer.learner import Learner, published
from penstock.actors.trainer.preferences.config import PreferencesConfig
from penstock.actors.trainer.preferences.examples import (
    PreferenceExample,
    PreferenceReply,
    unrelated_replies,
)
from penstock.actors.trainer.preferences.objective import (
    accumulate_preferences,
    dpo_losses,
    evaluate_preferences,
    kto_kl,
    kto_losses,
    reply_logprobs,
    with_reference,
)

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden/preferences/trl.json").read_text(encoding="utf-8")
)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", GOLDEN["dpo"])
def test_dpo_is_trls(case):
    config = PreferencesConfig(beta=case["beta"], label_smoothing=case["label_smoothing"])
    chosen = tensor(case["chosen"]) - tensor(case["reference_chosen"])
    rejected = tensor(case["rejected"]) - tensor(case["reference_rejected"])
    losses = dpo_losses(chosen, rejected, config)
    assert losses.tolist() == pytest.approx(case["losses"], rel=1e-12)


@pytest.mark.parametrize("case", GOLDEN["kto"])
def test_kto_is_trls(case):
    names = ("beta", "desirable_weight", "undesirable_weight")
    config = PreferencesConfig(**{name: case[name] for name in names})
    ratios = {
        name: tensor(case[name]) - tensor(case[f"reference_{name}"])
        for name in ("desirable", "undesirable", "unrelated")
    }
    kl = kto_kl(ratios["unrelated"])
    assert float(kl) == pytest.approx(case["kl"], rel=1e-12)
    own = torch.cat([ratios["desirable"], ratios["undesirable"]])
    is_desirable = torch.arange(len(own)) < len(ratios["desirable"])
    losses = kto_losses(own, is_desirable, kl, config)
    assert losses.tolist() == pytest.approx(case["losses"], rel=1e-12)


def test_dpo_by_hand():
    config = PreferencesConfig(beta=0.5)
    chosen, rejected = tensor([0.0, 2.0]).requires_grad_(), tensor([0.0, -2.0])
    losses = dpo_losses(chosen, rejected, config)
    losses.sum().backward()
    assert losses.tolist() == pytest.approx([math.log(2), math.log(1 + math.exp(-2))])
    assert chosen.grad.tolist() == pytest.approx([-0.25, -0.5 / (1 + math.exp(2))])
    smoothed = PreferencesConfig(beta=0.5, label_smoothing=0.1)
    right, wrong = math.log(1 + math.exp(-2)), math.log(1 + math.exp(2))
    expected = [math.log(2), 0.9 * right + 0.1 * wrong]
    assert dpo_losses(chosen, rejected, smoothed).tolist() == pytest.approx(expected)


def test_kto_by_hand():
    config = PreferencesConfig(beta=1.0, undesirable_weight=2.0)
    kl = kto_kl(tensor([3.0, -1.0]))
    assert float(kl) == 1.0
    assert float(kto_kl(tensor([-3.0, 1.0]))) == 0.0, "KL is not negative"
    assert float(kto_kl(tensor([]))) == 0.0
    ratios = tensor([1.0, 2.0, 1.0, 2.0]).requires_grad_()
    losses = kto_losses(ratios, torch.tensor([True, True, False, False]), kl, config)
    losses.sum().backward()
    above = 1 / (1 + math.exp(-1))
    assert losses.tolist() == pytest.approx([0.5, 1 - above, 1.0, 2 * above])
    slope = above * (1 - above)
    assert ratios.grad.tolist() == pytest.approx([-0.25, -slope, 0.5, 2 * slope])


RNG = np.random.default_rng(4)
CONFIG = small_config(preferences=PreferencesConfig(beta=0.3), micro_batch_tokens=96)


def reply(context, num_tokens, *, targets=None):
    ids = RNG.integers(0, 64, num_tokens)
    is_target = np.ones(num_tokens, bool) if targets is None else np.array(targets)
    return PreferenceReply(context_ids=context, reply_ids=ids, is_target=is_target)


def pair():
    context = RNG.integers(0, 64, int(RNG.integers(20, 40)))
    return PreferenceExample(chosen=reply(context, 7), rejected=reply(context, 4))


def label(is_desirable, weight=1.0):
    own = reply(RNG.integers(0, 64, 9), 6, targets=[True, True, False, False, True, True])
    return PreferenceExample(
        chosen=own if is_desirable else None, rejected=None if is_desirable else own, weight=weight
    )


def make_learner(seed):
    return Learner.initialized(POLICY, CONFIG.optimizer, seed)


def test_packed_replies_have_the_logprobs_of_each_alone():
    policy = make_learner(1).policy
    policy.requires_grad_(False)
    replies = [one for each in (pair(), label(True), pair()) for one in each.replies]
    together = reply_logprobs(policy, replies).tolist()
    apart = [float(reply_logprobs(policy, [one])) for one in replies]
    assert together == pytest.approx(apart, rel=1e-4)
    one = replies[2]
    ids = torch.from_numpy(np.concatenate([one.context_ids, one.reply_ids]))
    log_chances = policy.logits(policy(ids[:-1], [len(ids) - 1]).hidden).log_softmax(-1)
    at = len(one.context_ids) + np.flatnonzero(one.is_target)
    expected = sum(float(log_chances[i - 1, ids[i]]) for i in at.tolist())
    assert apart[2] == pytest.approx(expected, rel=1e-4)


def test_a_batch_s_gradient_is_that_of_its_mean_loss():
    """Over several passes, and as autograd gives it for the formula written out."""
    learner, reference = make_learner(1), published(make_learner(2).parameters)
    examples = [pair(), label(True), pair(), label(False, 0.5), label(True)]
    referred = with_reference(learner, reference, examples, CONFIG)
    with learner.computing_with(published(learner.parameters)):
        sums = accumulate_preferences(learner, referred, CONFIG, 2.0)
        found = {
            name: p.grad.clone() for name, p in learner.parameters.items() if p.grad is not None
        }
        learner.clear()
        policy = learner.policy
        labels = [each for each in examples if not each.is_pair]
        with learner.computing_with(reference), torch.no_grad():
            before = [reply_logprobs(policy, each.replies) for each in examples]
            z_before = reply_logprobs(policy, unrelated_replies(labels, 2048))
        with torch.no_grad():
            z_now = reply_logprobs(policy, unrelated_replies(labels, 2048))
        z = (z_now - z_before).mean().clamp(min=0)
        loss = torch.zeros(())
        for each, old in zip(examples, before, strict=True):
            ratio = reply_logprobs(policy, each.replies) - old
            if each.is_pair:
                loss = loss + torch.log1p(torch.exp(-0.3 * (ratio[0] - ratio[1])))
            else:
                sign = 1 if each.is_desirable else -1
                loss = loss + each.weight * (1 - torch.sigmoid(0.3 * sign * (ratio[0] - z)))
        loss = loss / len(examples)
        torch.autograd.backward(2.0 * loss)
    assert sums.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    assert (sums.num_pairs, sums.num_labels) == (2.0, 3.0)
    assert set(found) == {n for n, p in learner.parameters.items() if p.grad is not None}
    for name, gradient in found.items():
        expected = learner.parameters[name].grad
        torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=2e-6)


def test_the_reference_itself_has_no_margin():
    learner = make_learner(3)
    examples = [pair(), pair(), label(True), label(False)]
    with learner.computing_with(published(learner.parameters)):
        referred = with_reference(learner, published(learner.parameters), examples, CONFIG)
        sums = evaluate_preferences(learner, referred, CONFIG)
    assert sums.dpo_loss == pytest.approx(2 * math.log(2), rel=1e-4)
    assert sums.kto_loss == pytest.approx(2 * 0.5, rel=1e-4)
    assert sums.figures()["dpo_margin"] == pytest.approx(0.0, abs=1e-4)


def test_unrelated_replies_are_of_the_label_before_and_fit():
    labels = [label(True), label(False), label(True)]
    shifted = unrelated_replies(labels, 12)
    for index, each in enumerate(shifted):
        own, other = labels[index].replies[0], labels[index - 1].replies[0]
        assert np.array_equal(each.context_ids, own.context_ids)
        assert np.array_equal(each.reply_ids, other.reply_ids[:3])
        assert each.num_tokens == 12
    assert unrelated_replies(labels[:1], 100) == []


def test_one_label_alone_has_no_kl_term():
    learner = make_learner(1)
    (alone,) = with_reference(learner, published(make_learner(2).parameters), [label(True)], CONFIG)
    assert alone.reference.unrelated == 0.0
    with learner.computing_with(published(learner.parameters)):
        assert evaluate_preferences(learner, [alone], CONFIG).kto_kl == 0.0
        (heavier,) = [replace(alone, weight=3.0)]
        one = evaluate_preferences(learner, [alone], CONFIG).kto_loss
        assert evaluate_preferences(learner, [heavier], CONFIG).kto_loss == pytest.approx(3 * one)
