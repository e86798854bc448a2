"""The batcher under any schedule: bounded staleness, nothing twice, nothing lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.config import STALENESS_POLICIES, TrainerConfig
from penstock.kernels.arrays import to_array
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import CreditsChanged, Purpose

EMPTY = to_array(np.zeros(0, np.int32))
STEPS = 8


def turn(*spans):
    return Turn(
        context_ids=EMPTY,
        token_ids=EMPTY,
        behavior_logprobs=EMPTY,
        version_spans=[VersionSpan(policy_version=v, num_tokens=n) for v, n in spans],
        stop_reason=StopReason.STOP,
    )


class Schedule:
    """Pacer, workers and judge in one; what happens next is drawn by hypothesis."""

    def __init__(self, draw, config, group_size=2):
        self.draw, self.config, self.group_size = draw, config, group_size
        self.batcher = Batcher(config)
        self.version, self.num_granted = 0, 0
        self.running, self.turns = [], {}
        self.manifests = []

    def run(self):
        for _ in range(20_000):
            if self.version == STEPS:
                return
            self.grant()
            manifest = self.batcher.propose(self.version + 1)
            again = self.batcher.propose(self.version + 1)
            assert manifest == again, "looking must not change anything"
            if manifest is None:
                self.check_wait()
                self.happen()
                continue
            self.batcher.commit(manifest)
            self.manifests.append(manifest)
            self.version += 1
        raise AssertionError(f"stuck at version {self.version}: {self.batcher.waits_for}")

    def check_wait(self):
        """A step that withholds waits for its number of groups, never for one of them."""
        if self.config.staleness_policy != "withhold":
            return
        complete = [g for g in self.batcher._groups.values() if g.is_complete and self.pays(g)]
        assert len(complete) < self.config.groups_per_batch

    def pays(self, group):
        oldest_allowed = self.version - self.config.staleness_max
        is_fresh = any(s.policy_version >= oldest_allowed for s in group.trainable_spans)
        is_even = len({attempt.reward for attempt in group.unmasked}) == 1
        return is_fresh and not (is_even and self.config.filter_zero_variance)

    def grant(self):
        trained = sum(len(m.groups) for m in self.manifests)
        discarded = sum(len(m.discarded) for m in self.manifests)
        ahead = self.config.staleness_max + self.version + 1
        allowed = ahead * self.config.groups_per_batch + discarded
        while self.num_granted < allowed:
            for member in range(self.group_size):
                self.running.append((self.num_granted, member))
                self.sample((self.num_granted, member))
            self.num_granted += 1
        self.batcher.add_credits(
            CreditsChanged(
                policy_version=self.version,
                num_groups_granted=self.num_granted,
                num_groups_trained=trained,
                num_groups_discarded=discarded,
                num_groups_allowed=allowed,
                staleness_max=self.config.staleness_max,
            )
        )

    def happen(self):
        assert self.running, f"waits for {self.batcher.waits_for}, but nothing runs"
        rollout = self.running[self.draw(st.integers(0, len(self.running) - 1))]
        if self.draw(st.integers(0, 3)) == 0 and len(self.turns[rollout]) < 4:
            self.sample(rollout)
        else:
            self.running.remove(rollout)
            self.finish(*rollout)

    def sample(self, rollout):
        turns = self.turns.setdefault(rollout, [])
        turns.append(turn((self.version, 5)))
        self.batcher.add_turn(
            TurnSampled(
                rollout_id=self.name(*rollout),
                group_id=f"g{rollout[0]}",
                purpose=Purpose.TRAIN,
                turn_index=len(turns) - 1,
                turn=turns[-1],
            )
        )

    def finish(self, index, member):
        name = self.name(index, member)
        outcome = self.draw(st.sampled_from([Outcome.SOLVED, Outcome.FAILED, Outcome.JUDGE_ERROR]))
        finished = RolloutFinished(
            rollout_id=name,
            group_id=f"g{index}",
            group_index=index,
            group_size=self.group_size,
            member=member,
            purpose=Purpose.TRAIN,
            task_id="t",
            category="r",
            end=EpisodeEnd.FINISHED,
            turns=[turn.summary for turn in self.turns[index, member]],
            files=EpisodeFiles(),
        )
        verdict = Verdict(
            rollout_id=name,
            group_id=f"g{index}",
            group_index=index,
            purpose=Purpose.TRAIN,
            judge="tests",
            judge_version="1",
            outcome=outcome,
            reward=float(outcome is Outcome.SOLVED),
        )
        if self.draw(st.booleans()):
            self.batcher.add_rollout(finished)
            self.batcher.add_verdict(verdict)
        else:
            self.batcher.add_verdict(verdict)
            self.batcher.add_rollout(finished)

    def spans(self, name):
        index, member = (int(part) for part in name[1:].split("-"))
        return [span for t in self.turns[index, member] for span in t.version_spans]

    @staticmethod
    def name(index, member):
        return f"r{index}-{member}"

    def entries(self):
        for manifest in self.manifests:
            for group in (*manifest.groups, *manifest.discarded):
                for sample in group.samples:
                    yield manifest, group, sample


configs = st.builds(
    TrainerConfig,
    groups_per_batch=st.integers(1, 3),
    staleness_max=st.integers(0, 3),
    staleness_policy=st.sampled_from(STALENESS_POLICIES),
    filter_zero_variance=st.booleans(),
)


@settings(max_examples=30, deadline=None)
@given(st.data(), configs)
def test_any_schedule(data, config):
    schedule = Schedule(data.draw, config)
    schedule.run()
    check_each_rollout_is_accounted_for_once(schedule)
    check_staleness_is_bounded(schedule)
    check_advantages(schedule)


def check_each_rollout_is_accounted_for_once(schedule):
    seen = set()
    for manifest, group, sample in schedule.entries():
        assert sample.rollout_id not in seen, "accounted for twice"
        seen.add(sample.rollout_id)
        assert tokens(sample.version_spans) == tokens(schedule.spans(sample.rollout_id))
        if group in manifest.discarded:
            assert sample.advantage == 0.0
            left_out = {Outcome.STALE, Outcome.FILTERED, Outcome.WITHHELD}
            assert sample.outcome.is_masked or sample.outcome in left_out
        else:
            kept = {Outcome.SOLVED, Outcome.FAILED, Outcome.WITHHELD}
            assert sample.outcome.is_masked or sample.outcome in kept
    running = {index for index, _ in schedule.running}
    accounted = {group.group_index for _, group, _ in schedule.entries()}
    assert not accounted & running
    assert schedule.num_granted - len(accounted) == schedule.batcher.num_groups


def check_staleness_is_bounded(schedule):
    config = schedule.config
    for step, manifest in enumerate(schedule.manifests, start=1):
        assert (manifest.step, manifest.policy_version) == (step, step - 1)
    for manifest, group, sample in schedule.entries():
        if group in manifest.groups and not sample.outcome.is_masked:
            check_trained_tokens(schedule, manifest, sample)
    outcomes = {sample.outcome for _, _, sample in schedule.entries()}
    assert (config.staleness_policy == "drop") or Outcome.STALE not in outcomes
    assert (config.staleness_policy == "withhold") or Outcome.WITHHELD not in outcomes


def check_trained_tokens(schedule, manifest, sample):
    """Trained is exactly what is young enough: never more, and where tokens are withheld, all."""
    oldest_allowed = manifest.policy_version - schedule.config.staleness_max
    spans = schedule.spans(sample.rollout_id)
    fresh = [span for span in spans if span.policy_version >= oldest_allowed]
    assert tokens(sample.trained_spans) == tokens(fresh)
    assert all(span.policy_version >= oldest_allowed for span in sample.trained_spans)
    assert (sample.outcome is Outcome.WITHHELD) == (not fresh)


def check_advantages(schedule):
    for manifest in schedule.manifests:
        for group in manifest.groups:
            counted = [sample for sample in group.samples if not sample.outcome.is_masked]
            mean = sum(sample.reward for sample in counted) / len(counted)
            for sample in group.samples:
                above = sample.reward - mean if sample.outcome.is_trained else 0.0
                assert sample.advantage == above, "a withheld reward counts in the baseline"
            rewards = {sample.reward for sample in counted}
            assert not schedule.config.filter_zero_variance or len(rewards) > 1


def tokens(spans):
    return sum(span.num_tokens for span in spans)
