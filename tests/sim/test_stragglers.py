"""Slow tasks beside quick ones, in virtual time: who waits for whom, what of each is trained."""

import heapq
import itertools
import random
from collections import Counter, deque
from statistics import fmean

import numpy as np
import pytest

from penstock.actors.pacer.staleness_budget import Budget
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
from penstock.messages.telemetry import percentile

EMPTY = to_array(np.zeros(0, np.int32))
GROUPS, SIZE, SLOTS = 4, 4, 48
NUM_TURNS, TURN_TOKENS = 5, 10
STEP_S, STEPS = 5.0, 40
TICK_S = 1.0
QUANTILES = 4


class Fleet:
    """Pacer, workers, judge and trainer on one clock; only the batcher and the budget are real."""

    def __init__(
        self, policy: str, seed: int, staleness_max: int = 4, straggler_wait_s: float = 0.0
    ):
        self.config = TrainerConfig(
            groups_per_batch=GROUPS,
            staleness_max=staleness_max,
            staleness_policy=policy,
            straggler_wait_s=straggler_wait_s,
        )
        self.batcher = Batcher(self.config)
        self.budget = Budget(
            groups_per_batch=GROUPS, staleness_max=staleness_max, steps_max=STEPS
        ).with_version(0)
        self.dice = random.Random(seed)
        self.now, self.version, self.numbers = 0.0, 0, itertools.count()
        self.events: list = []
        self.queue: deque = deque()
        self.num_running = 0
        self.call_s: dict[int, float] = {}
        """Group -> seconds of its task's calls: most are quick, some are very slow."""
        self.spans: dict[str, list[VersionSpan]] = {}
        self.training = None
        self.idle_since = 0.0
        self.waits_s: list[float] = []
        self.manifests: list = []

    def run(self):
        self.grant()
        while self.version < STEPS:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
        return self

    def at(self, delay_s, happen):
        heapq.heappush(self.events, (self.now + delay_s, next(self.numbers), happen))

    def grant(self):
        for _ in range(self.budget.num_grantable):
            index = self.budget.num_granted
            self.call_s[index] = min(6.0, max(0.5, self.dice.lognormvariate(0.0, 0.8)))
            self.queue.extend((index, member) for member in range(SIZE))
            self.budget = self.budget.with_granted(1)
        self.batcher.add_credits(
            CreditsChanged(
                policy_version=self.version,
                num_groups_granted=self.budget.num_granted,
                num_groups_trained=self.budget.num_trained,
                num_groups_discarded=self.budget.num_discarded,
                num_groups_allowed=self.budget.num_allowed,
                staleness_max=self.budget.staleness_max,
            )
        )
        self.start()

    def start(self):
        while self.queue and self.num_running < SLOTS:
            self.num_running += 1
            index, member = self.queue.popleft()
            num_turns = self.dice.randint(NUM_TURNS - 2, NUM_TURNS + 2)
            self.sample(index, member, num_turns)

    def sample(self, index, member, num_left):
        name = f"r{index}-{member}"
        spans = self.spans.setdefault(name, [])
        spans.append(VersionSpan(policy_version=self.version, num_tokens=TURN_TOKENS))
        turn = Turn(
            context_ids=EMPTY,
            token_ids=EMPTY,
            behavior_logprobs=EMPTY,
            version_spans=spans[-1:],
            stop_reason=StopReason.STOP,
        )
        event = TurnSampled(
            rollout_id=name,
            group_id=f"g{index}",
            purpose=Purpose.TRAIN,
            turn_index=len(spans) - 1,
            turn=turn,
        )
        self.batcher.add_turn(event)
        call_s = self.call_s[index] * self.dice.uniform(0.7, 1.4)
        after = self.sample if num_left > 1 else self.finish
        left = (num_left - 1,) if num_left > 1 else ()
        self.at(call_s, lambda: after(index, member, *left))

    def finish(self, index, member):
        name = f"r{index}-{member}"
        turns = [
            Turn(
                context_ids=EMPTY,
                token_ids=EMPTY,
                behavior_logprobs=EMPTY,
                version_spans=[span],
                stop_reason=StopReason.STOP,
            ).summary
            for span in self.spans[name]
        ]
        self.batcher.add_rollout(
            RolloutFinished(
                rollout_id=name,
                group_id=f"g{index}",
                group_index=index,
                group_size=SIZE,
                member=member,
                purpose=Purpose.TRAIN,
                task_id="t",
                category="r",
                end=EpisodeEnd.FINISHED,
                turns=turns,
                files=EpisodeFiles(),
            )
        )
        is_solved = member % 2 == 0
        self.batcher.add_verdict(
            Verdict(
                rollout_id=name,
                group_id=f"g{index}",
                group_index=index,
                purpose=Purpose.TRAIN,
                judge="tests",
                judge_version="1",
                outcome=Outcome.SOLVED if is_solved else Outcome.FAILED,
                reward=float(is_solved),
            )
        )
        self.num_running -= 1
        self.start()
        self.propose()

    def propose(self):
        if self.training is not None:
            return
        manifest = self.batcher.propose(self.version + 1, now=self.now)
        if manifest is None:
            self.at(TICK_S, self.propose_if_over)
            return
        self.batcher.commit(manifest)
        self.manifests.append(manifest)
        self.waits_s.append(self.now - self.idle_since)
        self.budget = self.budget.with_batch(
            self.version, len(manifest.groups), len(manifest.discarded)
        )
        self.training = manifest
        self.at(STEP_S, self.stepped)
        self.grant()

    def propose_if_over(self):
        if self.batcher.patience.is_over(self.now):
            self.propose()

    def stepped(self):
        self.version += 1
        self.training, self.idle_since = None, self.now
        self.budget = self.budget.with_version(self.version)
        self.grant()
        self.propose()

    def lost_shares(self):
        """Return by quantile of a task's calls what it loses: its share of what was started and
        is accounted for, less that of what is trained; of rollouts, and of tokens.
        """
        started, trained = Counter(), Counter()
        settled = [g for m in self.manifests for g in (*m.groups, *m.discarded)]
        slowness = sorted(self.call_s[group.group_index] for group in settled)
        for manifest in self.manifests:
            for group in (*manifest.groups, *manifest.discarded):
                below = np.searchsorted(slowness, self.call_s[group.group_index])
                quantile = int(below * QUANTILES // len(slowness))
                for sample in group.samples:
                    fresh = num_tokens(sample.trained_spans) if group in manifest.groups else 0
                    started["rollouts", quantile] += 1
                    started["tokens", quantile] += num_tokens(sample.version_spans)
                    trained["rollouts", quantile] += fresh > 0
                    trained["tokens", quantile] += fresh
        return {
            kind: [
                started[kind, q] / sum(started[kind, each] for each in range(QUANTILES))
                - trained[kind, q] / sum(trained[kind, each] for each in range(QUANTILES))
                for q in range(QUANTILES)
            ]
            for kind in ("rollouts", "tokens")
        }


def num_tokens(spans):
    return sum(span.num_tokens for span in spans)


def test_a_short_wait_saves_tokens_of_slow_tasks_where_the_window_is_short():
    def figures(policy, wait_s):
        fleets = [Fleet(policy, seed, 2, wait_s).run() for seed in range(3)]
        waits_s = fmean(percentile(fleet.waits_s, 95) for fleet in fleets)
        lost = fmean(max(fleet.lost_shares()["tokens"]) for fleet in fleets)
        return fmean(fleet.now for fleet in fleets), waits_s, lost

    withheld, waited, paced = (
        figures("withhold", 0.0),
        figures("withhold", 3.0),
        figures("pace", 0.0),
    )
    assert waited[2] < 0.7 * withheld[2], (withheld, waited, paced)
    assert waited[0] < withheld[0] + 0.5 * (paced[0] - withheld[0])
    assert waited[1] < withheld[1] + 3.0 + TICK_S < paced[1]


@pytest.fixture(scope="module")
def fleets():
    """Return the same seeds under each policy."""
    return {
        policy: [Fleet(policy, seed).run() for seed in range(3)] for policy in STALENESS_POLICIES
    }


def test_no_quantile_of_slow_tasks_is_starved_where_old_tokens_are_withheld(fleets):
    lost = [fleet.lost_shares() for fleet in fleets["withhold"]]
    assert all(max(each["rollouts"]) <= 0.05 for each in lost), lost
    assert fmean(max(each["tokens"]) for each in lost) <= 0.05, lost
    samples = [
        sample
        for fleet in fleets["withhold"]
        for manifest in fleet.manifests
        for group in manifest.groups
        for sample in group.samples
    ]
    assert any(sample.trained_from for sample in samples), "some are trained in part"
    assert any(sample.outcome is Outcome.WITHHELD for sample in samples)


def test_dropping_late_groups_starves_the_slowest(fleets):
    lost = {
        policy: fmean(max(fleet.lost_shares()["rollouts"]) for fleet in fleets[policy])
        for policy in ("drop", "withhold")
    }
    assert lost["drop"] > 0.05 > 3 * lost["withhold"], lost


def test_a_step_waits_for_no_straggler_where_tokens_are_withheld(fleets):
    for paced, withheld in zip(fleets["pace"], fleets["withhold"], strict=True):
        assert percentile(withheld.waits_s, 95) < percentile(paced.waits_s, 95) / 2
        assert sum(withheld.waits_s) < sum(paced.waits_s) / 2
