"""Sessions in training: credit for all turns, feedback that comes days later."""

import msgspec
import numpy as np
import pytest

from penstock.actors.trainer.batching.assembly import num_exact_prefixes
from penstock.actors.trainer.batching.credit import entry_of
from penstock.actors.trainer.config import LiveConfig
from penstock.actors.trainer.off_policy import OffPolicy, measure
from penstock.actors.trainer.sequences import sample_sequences
from penstock.kernels.arrays import to_array
from penstock.messages.signals.declaration import SignalLevel

from .live_loop import NUM_TURNS, POLICY, LiveLoop


def learned(level: SignalLevel, num_rounds: int) -> tuple[float, float]:
    """Return the mean reward of the first and of the last five rounds."""
    loop, rewards = LiveLoop(level), []
    for _ in range(num_rounds):
        rewards.append(loop.sessions(16, delay_s=20.0))
        loop.advance(60.0)
    assert loop.trained_share == 1.0
    return float(np.mean(rewards[:5])), float(np.mean(rewards[-5:]))


@pytest.mark.slow
def test_a_goal_over_six_turns_is_learned_with_session_credit_and_not_without():
    before, after = learned(SignalLevel.SESSION, 60)
    assert before < 0.4 and after > before + 0.3, (before, after)
    before, after = learned(SignalLevel.REQUEST, 60)
    assert abs(after - before) < 0.15, (before, after)


@pytest.mark.parametrize(
    ("num_rounds", "age_min"), [(5, 3), pytest.param(40, 40, marks=pytest.mark.slow)]
)
def test_feedback_trains_however_many_versions_late_it_comes(num_rounds, age_min):
    """At an age limit of two steps none of 37 samples was trained."""
    loop = LiveLoop(SignalLevel.SESSION, num_samples=8)
    for _ in range(num_rounds):
        loop.sessions(8, delay_s=None)
        loop.advance(3600.0)
    for _ in range(6):
        loop.advance(12 * 3600.0)
    ages = [
        manifest.policy_version - span.policy_version
        for manifest in loop.manifests
        for entry in manifest.live
        for span in entry.version_spans
        if entry.outcome.is_trained
    ]
    assert max(ages) >= age_min > loop.config.staleness_max, max(ages)
    assert loop.trained_share >= 0.95, loop.trained_share


def test_turns_that_continue_are_one_sequence_and_others_are_not():
    loop = LiveLoop(SignalLevel.SESSION)
    loop.sessions(1, delay_s=10.0)
    loop.advance(60.0)
    (event,) = loop.samples.values()
    turns = [loop.turns[name] for name in event.request_ids]
    assert len(turns) == NUM_TURNS and num_exact_prefixes(turns) == NUM_TURNS - 1
    entry = entry_of(event)
    (whole,) = sample_sequences(entry, turns, POLICY, 1.0)
    assert whole.sampled_at.tolist() == [1, 3, 5, 7, 9, 11]
    other = to_array(np.array([62] * 7, np.int32))
    changed = [*turns[:3], msgspec.structs.replace(turns[3], context_ids=other), *turns[4:]]
    assert num_exact_prefixes(changed) == 3
    parts = sample_sequences(entry, changed, POLICY, 1.0)
    assert [part.sampled_at.size for part in parts] == [3, 1, 2]
    assert [metrics["live_exact_prefixes"] for metrics in loop.metrics] == [1.0]


def test_the_policy_that_drew_a_sample_is_at_no_distance_from_it():
    loop = LiveLoop(SignalLevel.SESSION)
    loop.sessions(4, delay_s=10.0)
    turns = dict(loop.turns)
    loop.now += 60.0
    loop.advance(0.0)
    samples = [entry_of(event) for event in loop.samples.values()]
    by_sample = {
        name: [turns[request] for request in event.request_ids]
        for name, event in loop.samples.items()
    }
    fresh = LiveLoop(SignalLevel.SESSION).learner
    for figures in measure(fresh, samples, by_sample, loop.config).values():
        assert figures.ess == pytest.approx(1.0) and figures.ratio == pytest.approx(1.0)
    for figures in measure(loop.learner, samples, by_sample, loop.config).values():
        assert figures.ess < 1.0 - 1e-6


def test_a_sample_that_the_correction_cannot_carry_is_stale():
    config = LiveConfig(ess_min=0.1, ratio_min=0.02)
    assert not OffPolicy(ess=0.2, ratio=0.5).is_stale(config)
    assert OffPolicy(ess=0.05, ratio=0.5).is_stale(config)
    assert OffPolicy(ess=0.5, ratio=0.01).is_stale(config)
    assert OffPolicy(ess=0.5, ratio=100.0).is_stale(config)
