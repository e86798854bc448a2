import numpy as np
import pytest

from penstock.actors.trainer.batching.live import LiveSamples
from penstock.actors.trainer.config import LiveConfig, TrainerConfig
from penstock.kernels.arrays import to_array
from penstock.messages.feedback import FeedbackRetracted, LiveSampleJoined
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.training import BatchManifest

EMPTY = to_array(np.zeros(0, np.int32))


def joined(name, reward=1.0, version=0):
    turn = Turn(
        context_ids=EMPTY,
        token_ids=EMPTY,
        behavior_logprobs=EMPTY,
        version_spans=[VersionSpan(policy_version=version, num_tokens=4)],
        stop_reason=StopReason.STOP,
    )
    return LiveSampleJoined(
        sample_id=name,
        request_ids=[name],
        feedback_ids=[f"f-{name}"],
        reward=reward,
        variant="main",
        propensity=1.0,
        policy_version=version,
        turns=[turn.summary],
    )


def retracted(name):
    return FeedbackRetracted(feedback_id=f"f-{name}", request_id=name)


@pytest.fixture
def pool():
    live = LiveConfig(num_samples_max=2, baseline_momentum=0.5)
    return LiveSamples(TrainerConfig(live=live, staleness_max=1))


def take(pool, version):
    entries = pool.entries(version)
    assert pool.entries(version) == entries, "looking must not change anything"
    pool.commit(BatchManifest(step=version + 1, policy_version=version, groups=[], live=entries))
    return {entry.rollout_id: entry for entry in entries}


def test_samples_train_in_order_up_to_the_cap_against_the_baseline(pool):
    for name, reward in (("a", 1.0), ("b", -1.0), ("c", 1.0)):
        pool.add(joined(name, reward))
    first = take(pool, 0)
    assert {name: entry.outcome for name, entry in first.items()} == {
        "a": Outcome.SOLVED,
        "b": Outcome.FAILED,
    }
    assert [entry.advantage for entry in first.values()] == [0.0, 0.0]
    assert pool.baseline.value == 0.0
    second = take(pool, 1)
    assert list(second) == ["c"] and second["c"].advantage == 1.0
    assert take(pool, 2) == {}


def test_a_sample_too_old_is_accounted_for_as_stale(pool):
    pool.add(joined("old", version=0))
    pool.add(joined("new", version=2))
    entries = take(pool, 2)
    assert (entries["old"].outcome, entries["old"].advantage) == (Outcome.STALE, 0.0)
    assert entries["new"].outcome is Outcome.SOLVED
    assert pool.baseline.num_samples == 1


@pytest.mark.parametrize("retracted_first", [False, True])
def test_a_withdrawn_sample_is_never_trained(pool, retracted_first):
    events = [(pool.add, joined("a")), (pool.retract, retracted("a"))]
    for handle, event in reversed(events) if retracted_first else events:
        handle(event)
    assert take(pool, 0)["a"].outcome is Outcome.CANCELLED
    assert pool.baseline.num_samples == 0


def test_a_trained_sample_does_not_come_back(pool):
    pool.add(joined("a"))
    take(pool, 0)
    pool.add(joined("a"))
    pool.retract(retracted("a"))
    assert take(pool, 1) == {}


def test_a_sample_that_cannot_be_trained_is_accounted_for(pool):
    pool.add(joined("bad"))
    pool.add(joined("good"))
    pool.leave_out("bad")
    pool.leave_out("unknown")
    entries = take(pool, 0)
    assert entries["bad"].outcome is Outcome.INFRASTRUCTURE_ERROR
    assert entries["good"].outcome is Outcome.SOLVED
    assert pool.baseline.num_samples == 1
