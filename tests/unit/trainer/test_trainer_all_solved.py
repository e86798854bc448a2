"""Groups that all did equally well: which are trained, who is counted, what they weigh."""

import msgspec
import numpy as np
import pytest
import torch
from tests.sim.trainer.conftest import POLICY, make_turn
from tests.unit.trainer.test_trainer_batcher import Feed

from penstock.actors.trainer.batching.audit import ManifestAudit
from penstock.actors.trainer.batching.manifests import batch_figures
from penstock.actors.trainer.config import LossConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.step import train_step
from penstock.messages.errors import ConfigError
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import VersionSpan
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

SOLVED, FAILED = Outcome.SOLVED, Outcome.FAILED


def verdict(index, member, outcome, score, penalty):
    components = {"tests": score} | ({"length_penalty": -penalty} if penalty else {})
    return Verdict(
        rollout_id=f"r{index}-{member}", group_id=f"g{index}", group_index=index,
        purpose=Purpose.TRAIN, judge="tests", judge_version="1", outcome=outcome,
        reward=sum(components.values()), components=components,
    )  # fmt: skip


class JudgedFeed(Feed):
    """Groups with outcomes, scores and length penalties."""

    def judge(self, index, member, reward, purpose=Purpose.TRAIN):
        self.batcher.add_verdict(verdict(index, member, *reward))


ALL_SOLVED = ((SOLVED, 1.0, 0.05), (SOLVED, 1.0, 0.01))
ALL_FAILED = ((FAILED, 0.0, 0.0), (FAILED, 0.0, 0.0))
MIXED = ((SOLVED, 1.0, 0.02), (FAILED, 0.0, 0.0))
PARTIAL = ((FAILED, 0.25, 0.0), (FAILED, 0.75, 0.0))


def fed(*groups, **config):
    feed = JudgedFeed(**config)
    for index, rewards in enumerate(groups):
        feed.finish(index, rewards)
    return feed


def test_a_group_that_differs_in_lengths_alone_is_filtered():
    manifest = fed(ALL_SOLVED, MIXED, ALL_FAILED, PARTIAL).step(1)
    assert [group.group_index for group in manifest.groups] == [1, 3]
    assert [group.group_index for group in manifest.discarded] == [0, 2]
    assert batch_figures(manifest)["num_groups_all_solved"] == 0


def test_the_pass_rate_is_of_all_complete_groups():
    manifest = fed(ALL_SOLVED, MIXED, ALL_FAILED, PARTIAL, ALL_SOLVED).step(1)
    assert batch_figures(manifest)["pass_rate"] == 5 / 10
    counts = [(g.num_judged, g.num_solved) for g in (*manifest.groups, *manifest.discarded)]
    assert counts == [(2, 1), (2, 0), (2, 2), (2, 0), (2, 2)]


def test_stale_groups_and_those_with_masked_rollouts_count_as_judged():
    feed = JudgedFeed(staleness_policy="drop")
    feed.finish(0, ALL_SOLVED)
    feed.finish(1, (*MIXED, (Outcome.JUDGE_ERROR, 0.0, 0.0)), version=2)
    feed.finish(2, MIXED, version=2)
    for step in (1, 2):
        feed.batcher.commit(BatchManifest(step=step, policy_version=step - 1, groups=[]))
    manifest = feed.step(3)
    assert {sample.outcome for sample in manifest.discarded[0].samples} == {Outcome.STALE}
    assert batch_figures(manifest)["pass_rate"] == 4 / 6


def test_a_setting_lets_them_in_beside_the_batch():
    manifest = fed(ALL_SOLVED, MIXED, ALL_SOLVED, PARTIAL, length_only_groups=True).step(1)
    assert [(g.group_index, g.is_length_only) for g in manifest.groups] == [
        (1, False), (3, False), (0, True), (2, True),
    ]  # fmt: skip
    assert (manifest.num_placed, manifest.num_made_up_for) == (2, 2)
    advantages = [sample.advantage for sample in manifest.groups[2].samples]
    assert advantages == pytest.approx([-0.02, 0.02])
    equal = ((SOLVED, 1.0, 0.01), (SOLVED, 1.0, 0.01))
    manifest = fed(equal, MIXED, PARTIAL, length_only_groups=True).step(1)
    assert [group.group_index for group in manifest.discarded] == [0]
    with pytest.raises(ConfigError, match=r"trainer\.length_only_groups: expected filter_zero"):
        TrainerConfig(length_only_groups=True, filter_zero_variance=False)


def test_the_audit_finds_a_group_in_the_wrong_place():
    config = TrainerConfig(length_only_groups=True)
    manifest = fed(ALL_SOLVED, MIXED, PARTIAL, length_only_groups=True).step(1)

    def differences(is_length_only):
        audit = ManifestAudit(config)
        for index, rewards in enumerate((ALL_SOLVED, MIXED, PARTIAL)):
            for member, reward in enumerate(rewards):
                audit.add_verdict(verdict(index, member, *reward))
        groups = [
            msgspec.structs.replace(group, is_length_only=is_length_only(group))
            for group in manifest.groups
        ]
        changed = msgspec.structs.replace(manifest, groups=groups, settings="")
        return [text for text in audit.differences(changed) if "trained" in text]

    assert differences(lambda group: group.is_length_only) == []
    assert differences(lambda _: False) == [
        "step 1, g0: trained in the batch, but its rollouts did equally well"
    ]
    assert differences(lambda _: True) == [
        "step 1, g1: trained beside the batch, but its rollouts differ",
        "step 1, g2: trained beside the batch, but its rollouts differ",
    ]


def gradients(groups):
    """Return what a step would add to the weights, for groups of (advantage, is_length_only)."""
    rng = np.random.default_rng(5)
    turns, entries = {}, []
    for index, (advantages, is_length_only) in enumerate(groups):
        samples = []
        for member, advantage in enumerate(advantages):
            name = f"r{index}-{member}"
            turns[name] = [make_turn(rng, 0, ())]
            num_tokens = turns[name][0].token_ids.shape[0]
            spans = [VersionSpan(policy_version=0, num_tokens=num_tokens)]
            samples.append(
                SampleEntry(rollout_id=name, outcome=SOLVED, reward=advantage,
                            advantage=advantage, version_spans=spans)
            )  # fmt: skip
        entries.append(
            GroupEntry(group_id=f"g{index}", group_index=index, task_id="t", samples=samples,
                       is_length_only=is_length_only)
        )  # fmt: skip
    manifest = BatchManifest(step=1, policy_version=0, groups=entries)
    learner = Learner.initialized(POLICY, OptimizerConfig(), seed=1)
    seen = {}

    def applied(step, config, steps_max):
        seen.update(
            {n: p.grad.clone() for n, p in learner.parameters.items() if p.grad is not None}
        )
        learner.clear()
        return 1.0

    learner.apply = applied
    train_step(learner, manifest, turns, TrainerConfig(loss=LossConfig(correction="none")))
    return seen


def test_what_is_beside_the_batch_changes_no_gradient_of_the_others():
    others = [((0.5, -0.5), False), ((0.25, -0.75), False)]
    alone = gradients(others)
    none_of_it = gradients([*others, ((0.0, 0.0), True), ((0.0, 0.0), True)])
    diluted = gradients([*others, ((0.0, 0.0), False), ((0.0, 0.0), False)])
    for name, value in alone.items():
        torch.testing.assert_close(none_of_it[name], value, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(diluted[name], value / 2, rtol=1e-4, atol=1e-7)


def test_what_is_beside_the_batch_weighs_as_much_as_the_batch_at_most():
    others = [((0.0, 0.0), False)]
    one = gradients([*others, ((0.02, -0.02), True)])
    many = gradients([*others, ((0.02, -0.02), True), *[((0.0, 0.0), True)] * 3])
    assert any(value.abs().max() > 0 for value in one.values())
    for name, value in one.items():
        torch.testing.assert_close(many[name], value / 4, rtol=1e-4, atol=1e-8)
