"""Rollouts of one tree in training: each token once, the trunk with the branches' mean."""

import msgspec
import numpy as np
import pytest
import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.audit import ManifestAudit
from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.sequences import rollout_sequences, training_sequence
from penstock.kernels.arrays import to_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.reading.trajectories import own_turns
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    Trunk,
    Turn,
    VersionSpan,
)
from penstock.messages.task import Purpose, Sampling

LAYERS, SLOTS = 2, 1
POLICY = PolicyConfig(num_hidden_layers=LAYERS, num_experts_per_tok=SLOTS)


def turn(
    context: list[int], sampled: list[int], num_routes: int, version: int = 0, start: int = 0
) -> Turn:
    routes = torch.full((num_routes, LAYERS, SLOTS), version, dtype=torch.int16)
    segment = seal_routes(routes, num_experts=4, policy_version=version, first_position=start)
    return Turn(
        context_ids=to_array(np.array(context, np.int32)),
        token_ids=to_array(np.array(sampled, np.int32)),
        behavior_logprobs=to_array(np.full(len(sampled), -1.0, np.float32)),
        route_segments=[segment],
        version_spans=[VersionSpan(policy_version=version, num_tokens=len(sampled))],
        stop_reason=StopReason.STOP,
        sampling=Sampling(),
    )


SHARED = turn([1, 2, 3], [4, 5], 4)
TRUNK_OWN = turn([6], [7], 2, start=4)
BRANCH_OWN = turn([6], [8, 9, 10], 8, version=1)
"""Its routes cover the trunk too: `routes_from` was 0."""


def finished(member: int, turns: list[Turn], trunk: Trunk | None = None) -> RolloutFinished:
    return RolloutFinished(
        rollout_id=f"r{member}", group_id="g0", group_index=0, group_size=4, member=member,
        purpose=Purpose.TRAIN, task_id="t", category="r", end=EpisodeEnd.FINISHED,
        turns=[each.summary for each in turns], files=EpisodeFiles(), trunk=trunk,
    )  # fmt: skip


def proposed(outcomes: dict[int, tuple[Outcome, float]]):
    """One group of two trees of two: 0 with branch 1, 2 with branch 3; who audits it knows them."""
    config = TrainerConfig(groups_per_batch=1, staleness_max=1)
    batcher, audit = Batcher(config), ManifestAudit(config)
    for member in range(4):
        trunk = Trunk(rollout_id=f"r{member - 1}", num_turns=1) if member % 2 else None
        own = BRANCH_OWN if trunk else TRUNK_OWN
        end = finished(member, [SHARED, own], trunk)
        outcome, reward = outcomes[member]
        verdict = Verdict(
            rollout_id=f"r{member}", group_id="g0", group_index=0, purpose=Purpose.TRAIN,
            judge="tests", judge_version="1", outcome=outcome, reward=reward,
            policy_version=0, category="r", components={},
        )  # fmt: skip
        for each in (batcher, audit):
            each.add_rollout(end)
            each.add_verdict(verdict)
    manifest = batcher.propose(1)
    assert manifest is not None
    return manifest, audit


def batch(outcomes: dict[int, tuple[Outcome, float]]):
    manifest, _ = proposed(outcomes)
    return {sample.rollout_id: sample for sample in manifest.groups[0].samples}


SOLVED, FAILED = (Outcome.SOLVED, 1.0), (Outcome.FAILED, 0.0)
LOST = (Outcome.INFRASTRUCTURE_ERROR, 0.0)


def test_a_trunk_earns_the_mean_of_its_branches_above_the_groups_baseline():
    samples = batch({0: SOLVED, 1: SOLVED, 2: FAILED, 3: SOLVED})
    assert [samples[f"r{n}"].advantage for n in range(4)] == [0.25, 0.25, -0.75, 0.25]
    assert [samples[f"r{n}"].trunk.advantage for n in (0, 2)] == [0.25, -0.25]
    assert samples["r0"].trunk.branches == ["r0", "r1"]
    assert samples["r0"].trunk.num_tokens == 2
    assert samples["r1"].trunk is None
    counts = {name: sum(s.num_tokens for s in one.version_spans) for name, one in samples.items()}
    assert counts == {"r0": 3, "r1": 3, "r2": 3, "r3": 3}  # the trunk's two are r0's and r2's


def test_masked_branches_do_not_count_and_a_masked_trunk_is_not_trained():
    samples = batch({0: SOLVED, 1: LOST, 2: LOST, 3: FAILED})
    assert samples["r0"].trunk is None and samples["r2"].trunk is None
    assert [samples[f"r{n}"].advantage for n in range(4)] == [0.5, 0.0, 0.0, -0.5]


@pytest.mark.parametrize("outcomes", [[1, 1, 0, 1], [1, -1, -1, 0], [1, 0, -1, 1]])
def test_the_audit_finds_nothing_in_what_the_batcher_proposes(outcomes):
    judged = {-1: LOST, 0: FAILED, 1: SOLVED}
    manifest, audit = proposed({n: judged[one] for n, one in enumerate(outcomes)})
    assert list(audit.differences(manifest)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_tokens": 3},
        {"advantage": 0.5},
        {"branches": ["r0"]},
        {"branches": ["r0", "r3"]},
        {"branches": ["r0", "nobody"]},
        None,
    ],
)
def test_the_audit_tells_a_trunk_that_does_not_follow_from_the_rollouts(wrong):
    manifest, audit = proposed({0: SOLVED, 1: SOLVED, 2: FAILED, 3: SOLVED})
    (group,) = manifest.groups
    first = group.samples[0]
    trunk = msgspec.structs.replace(first.trunk, **wrong) if wrong else None
    samples = [msgspec.structs.replace(first, trunk=trunk), *group.samples[1:]]
    group = msgspec.structs.replace(group, samples=samples)
    (difference,) = audit.differences(msgspec.structs.replace(manifest, groups=[group]))
    assert difference.startswith("step 1, r0: its trunk's credit")


def test_own_turns_train_what_was_sampled_after_the_trunk():
    turns = [SHARED, BRANCH_OWN]
    branch = finished(1, turns, Trunk(rollout_id="r0", num_turns=1))
    assert branch.own_turns == [BRANCH_OWN.summary]
    assert [branch.turn_key(index) for index in range(2)] == ["r0.0", "r1.1"]
    sequence = training_sequence("r1", own_turns(branch, turns), POLICY, 0.5)
    assert sequence.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    assert sequence.sampled_at.tolist() == [6, 7, 8]
    assert sequence.routed_experts[:, 0, 0].tolist() == [1] * 8
    whole = training_sequence("r1", [SHARED, TRUNK_OWN], POLICY, 0.5)
    assert whole.sampled_at.tolist() == [3, 4, 6]


def test_each_token_gets_its_own_advantage():
    trunk = batch({0: SOLVED, 1: SOLVED, 2: FAILED, 3: SOLVED})["r2"]
    [sequence] = rollout_sequences(trunk, [SHARED, TRUNK_OWN], POLICY)
    assert sequence.advantages.tolist() == [-0.25, -0.25, -0.75]
    # as if the trunk were in both branches' sequences, with half the weight in each
    assert sequence.advantages[0] == pytest.approx((-0.75 + 0.25) / 2)
