"""The batcher's rules, one by one."""

import numpy as np
import pytest

from penstock.actors.trainer.batching.batcher import (
    BatchCandidate,
    Batcher,
    Room,
    earliest,
    must_wait_for,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.kernels.arrays import to_array
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    SandboxRecord,
    StopReason,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import CreditsChanged, Purpose

EMPTY = to_array(np.zeros(0, np.int32))


def turn(version, num_tokens=3):
    return Turn(
        context_ids=EMPTY,
        token_ids=EMPTY,
        behavior_logprobs=EMPTY,
        version_spans=[VersionSpan(policy_version=version, num_tokens=num_tokens)],
        stop_reason=StopReason.STOP,
    )


def machine(image):
    return SandboxRecord(
        backend="uml", isolation_class="user_mode_kernel", kernel_digest="k", image_digest=image
    )


class Feed:
    """Feeds a batcher group by group."""

    def __init__(self, **config):
        self.batcher = Batcher(TrainerConfig(groups_per_batch=2, staleness_max=1, **config))

    def run(self, index, version=0, purpose=Purpose.TRAIN):
        event = TurnSampled(
            rollout_id=f"r{index}-0",
            group_id=f"g{index}",
            purpose=purpose,
            turn_index=0,
            turn=turn(version),
        )
        self.batcher.add_turn(event)

    def finish(
        self,
        index,
        rewards=(1.0, 0.0),
        version=0,
        purpose=Purpose.TRAIN,
        end=None,
        images=(),
        versions=(),
    ):
        for member, reward in enumerate(rewards):
            self.batcher.add_rollout(
                RolloutFinished(
                    rollout_id=f"r{index}-{member}",
                    group_id=f"g{index}",
                    group_index=index,
                    group_size=len(rewards),
                    member=member,
                    purpose=purpose,
                    task_id="t",
                    category="r",
                    end=end or EpisodeEnd.FINISHED,
                    turns=[
                        turn(one).summary for one in (versions[member] if versions else [version])
                    ],
                    files=EpisodeFiles(),
                    sandbox=machine(images[member]) if images else None,
                )
            )
            if end is None:
                self.judge(index, member, reward, purpose)

    def judge(self, index, member, reward, purpose=Purpose.TRAIN):
        outcome = reward if isinstance(reward, Outcome) else Outcome.SOLVED
        self.batcher.add_verdict(
            Verdict(
                rollout_id=f"r{index}-{member}",
                group_id=f"g{index}",
                group_index=index,
                purpose=purpose,
                judge="tests",
                judge_version="1",
                outcome=outcome,
                reward=0.0 if isinstance(reward, Outcome) else reward,
            )
        )

    def step(self, step):
        manifest = self.batcher.propose(step)
        if manifest is not None:
            self.batcher.commit(manifest)
        return manifest

    def trained(self, step):
        manifest = self.step(step)
        return None if manifest is None else [group.group_index for group in manifest.groups]


def test_the_example_of_the_docstring():
    feed = Feed()
    for index in range(4):
        feed.run(index)
    feed.finish(1)
    assert feed.trained(1) is None
    feed.finish(2)
    assert feed.trained(1) == [1, 2]
    feed.run(4, version=1)
    feed.finish(3)
    feed.finish(4, version=1)
    assert feed.trained(2) is None
    assert feed.batcher.waits_for == "group g0, due in step 2 or soon"
    feed.finish(0)
    assert feed.trained(2) == [0, 3]


def test_a_rollout_on_another_image_than_its_groups_is_masked():
    feed = Feed(filter_zero_variance=False)
    feed.finish(0, rewards=(1.0, 0.0, 1.0), images=("a", "b", "a"))
    feed.finish(1, rewards=(1.0, 0.0), images=("b", "b"))
    manifest = feed.step(1)
    outcomes = [[sample.outcome for sample in group.samples] for group in manifest.groups]
    assert outcomes[0] == [Outcome.SOLVED, Outcome.INFRASTRUCTURE_ERROR, Outcome.SOLVED]
    assert Outcome.INFRASTRUCTURE_ERROR not in outcomes[1]


def test_dropping_does_not_wait_and_accounts_for_the_late_group():
    feed = Feed(staleness_policy="drop")
    feed.run(0)
    for index in (1, 2):
        feed.finish(index)
    assert feed.trained(1) == [1, 2]
    for index in (3, 4):
        feed.finish(index, version=1)
    assert feed.trained(2) == [3, 4]
    feed.finish(0)
    for index in (5, 6):
        feed.finish(index, version=2)
    manifest = feed.step(3)
    assert [group.group_index for group in manifest.discarded] == [0]
    assert {sample.outcome for sample in manifest.discarded[0].samples} == {Outcome.STALE}


def test_withholding_does_not_wait_and_trains_what_is_fresh_of_a_late_group():
    """Steps 1 and 2 go on without group 0, whose second rollout is still sampling at version 2."""
    feed = Feed(staleness_policy="withhold")
    feed.run(0)
    for index in (1, 2):
        feed.finish(index)
    assert feed.trained(1) == [1, 2]
    for index in (3, 4):
        feed.finish(index, version=1)
    assert feed.trained(2) == [3, 4]
    feed.finish(0, rewards=(1.0, 0.0, 0.0), versions=((0,), (0, 2), (0,)))
    feed.finish(5, version=2)
    late = feed.step(3).groups[0]
    assert late.group_id == "g0"
    assert [sample.outcome for sample in late.samples] == [
        Outcome.WITHHELD, Outcome.SOLVED, Outcome.WITHHELD,
    ]  # fmt: skip
    assert [sample.reward for sample in late.samples] == [1.0, 0.0, 0.0]
    assert [sample.advantage for sample in late.samples] == [0.0, -1 / 3, 0.0]
    assert late.samples[1].trained_from == 1
    assert late.samples[1].trained_spans == [VersionSpan(policy_version=2, num_tokens=3)]


@pytest.mark.parametrize("policy", ["withhold", "drop"])
def test_a_step_waits_for_a_straggler_for_so_long_and_goes_without_it(policy):
    feed = Feed(staleness_policy=policy, straggler_wait_s=3.0)
    feed.run(0)
    for index in (1, 2):
        feed.finish(index)
    assert feed.trained(1) == [1, 2], "group 0 can still come in time"
    for index in (3, 4):
        feed.finish(index, version=1)
    batcher = feed.batcher
    assert batcher.propose(2, now=10.0) is None and batcher.waits_for.startswith("group g0")
    assert batcher.propose(2, now=12.9) is None and not batcher.patience.is_over(12.9)
    assert batcher.patience.is_over(13.0)
    manifest = batcher.propose(2, now=13.0)
    assert [group.group_index for group in manifest.groups] == [3, 4]
    assert batcher.propose(2, now=20.0) is not None, "proposing moves nothing, nor begins a wait"
    batcher.commit(manifest)
    assert not batcher.patience.is_over(99.0), "the next step has a wait of its own"


def test_a_group_without_a_fresh_token_is_withheld_whole():
    feed = Feed(staleness_policy="withhold")
    for step in (1, 2):
        for index in (2 * step, 2 * step + 1):
            feed.finish(index, version=step - 1)
        feed.step(step)
    feed.finish(0, rewards=(1.0, Outcome.JUDGE_ERROR))
    for index in (8, 9):
        feed.finish(index, version=2)
    manifest = feed.step(3)
    assert [group.group_index for group in manifest.groups] == [8, 9]
    outcomes = [sample.outcome for sample in manifest.discarded[0].samples]
    assert outcomes == [Outcome.WITHHELD, Outcome.JUDGE_ERROR]


def test_masked_rollouts_take_no_part_in_the_baseline():
    feed = Feed()
    feed.finish(0, (1.0, Outcome.JUDGE_ERROR, 0.0))
    feed.finish(1)
    samples = feed.step(1).groups[0].samples
    assert [sample.advantage for sample in samples] == [0.5, 0.0, -0.5]
    assert samples[1].outcome is Outcome.JUDGE_ERROR


def test_equal_rewards_are_filtered_only_if_so_configured():
    feed = Feed()
    feed.finish(0, (1.0, 1.0))
    feed.finish(1)
    feed.finish(2)
    manifest = feed.step(1)
    assert [group.group_index for group in manifest.discarded] == [0]
    assert {sample.outcome for sample in manifest.discarded[0].samples} == {Outcome.FILTERED}
    keeping = Feed(filter_zero_variance=False)
    keeping.finish(0, (1.0, 1.0))
    keeping.finish(1)
    assert keeping.trained(1) == [0, 1]


def test_a_group_that_failed_outside_the_policy_is_discarded_as_such():
    feed = Feed()
    feed.finish(0, (0.0, 0.0), end=EpisodeEnd.INFRASTRUCTURE_ERROR)
    feed.finish(1)
    feed.finish(2)
    manifest = feed.step(1)
    outcomes = {sample.outcome for sample in manifest.discarded[0].samples}
    assert outcomes == {Outcome.INFRASTRUCTURE_ERROR}


def test_the_first_verdict_counts():
    feed = Feed()
    feed.finish(0)
    feed.judge(0, 0, 0.25)
    feed.finish(1)
    assert [sample.reward for sample in feed.step(1).groups[0].samples] == [1.0, 0.0]


def test_evaluation_and_settled_groups_are_not_seen():
    feed = Feed()
    feed.finish(7, purpose=Purpose.EVAL)
    feed.finish(0)
    assert feed.trained(1) is None
    feed.finish(1)
    assert feed.trained(1) == [0, 1]
    feed.finish(0, version=1)
    assert feed.batcher.num_groups == 0


def credits(granted, trained, discarded, version):
    return CreditsChanged(
        policy_version=version,
        num_groups_granted=granted,
        num_groups_trained=trained,
        num_groups_discarded=discarded,
        num_groups_allowed=granted,
        staleness_max=1,
    )


def test_when_nothing_more_can_come_a_smaller_batch_is_taken_and_made_up_for():
    feed = Feed()
    feed.finish(0)
    for index in (1, 2, 3):
        feed.finish(index, (0.0, 0.0))
    assert feed.trained(1) is None, "no credits known: more may come"
    feed.batcher.add_credits(credits(5, 0, 0, 0))
    assert feed.trained(1) is None, "a fifth group runs"
    feed.batcher.add_credits(credits(4, 0, 0, 0))
    assert feed.trained(1) == [0]
    for index in (4, 5, 6, 7):
        feed.finish(index, version=1)
    assert feed.trained(2) == [4, 5, 6], "two for this step, one for the step before"


def test_old_credits_do_not_make_a_batch_small():
    feed = Feed()
    for index in (0, 1):
        feed.finish(index)
    feed.batcher.add_credits(credits(3, 0, 0, 0))
    assert feed.trained(1) == [0, 1]
    feed.finish(2)
    assert feed.trained(2) is None, "these credits are of version 0"
    feed.batcher.add_credits(credits(3, 2, 0, 1))
    assert feed.trained(2) == [2]


def test_manifests_are_committed_in_order():
    feed = Feed()
    for index in range(2):
        feed.finish(index)
    manifest = feed.batcher.propose(2)
    with pytest.raises(AssertionError, match="2 after 0"):
        feed.batcher.commit(manifest)


def candidates(*specs):
    return [
        BatchCandidate(group_id=name, group_index=i, deadline=deadline, is_complete=name.isupper())
        for i, (name, deadline) in enumerate(specs)
    ]


@pytest.mark.parametrize(
    ("version", "specs", "taken", "awaited"),
    [
        (1, [("A", 2), ("B", 2), ("c", 2), ("D", 3)], "AB", []),
        (2, [("c", 2), ("D", 3), ("E", 4)], "DE", ["c"]),
        (2, [("C", 2), ("D", 3), ("E", 4)], "CD", []),
        (1, [("A", 1), ("B", 1), ("c", 1)], "AB", []),
        (1, [("a", 2), ("b", 2), ("c", 2), ("D", 3), ("E", 3)], "DE", ["a", "b", "c"]),
    ],
)
def test_deadlines(version, specs, taken, awaited):
    """Capitals are complete, small letters run; two groups a batch."""
    room = Room(version=version, groups_per_batch=2, num_trained=2 * version)
    found = candidates(*specs)
    chosen = earliest(found, room)
    assert "".join(candidate.group_id for candidate in chosen) == taken
    assert must_wait_for(found, chosen, room) == awaited
