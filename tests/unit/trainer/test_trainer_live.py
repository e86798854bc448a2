import msgspec
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


def joined(name, reward=1.0, version=0, user=""):
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
        tenant=user,
        user=user,
        variant="main",
        propensity=1.0,
        policy_version=version,
        turns=[turn.summary],
    )


def retracted(name):
    return FeedbackRetracted(feedback_id=f"f-{name}", request_id=name)


def revised(name, revision, reward):
    """Another reward, or None: all feedback is taken back."""
    return msgspec.structs.replace(
        joined(name, reward or 0.0),
        revision=revision,
        unrated=[0] if reward is None else [],
        feedback_ids=[] if reward is None else [f"g-{name}"],
    )


@pytest.fixture
def pool():
    live = LiveConfig(num_samples_max=2, num_waiting_max=3)
    return LiveSamples(TrainerConfig(live=live, staleness_max=1))


def take(pool, version):
    entries = pool.entries()
    assert pool.entries() == entries, "looking must not change anything"
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
    signs = [entry.advantage > 0 for entry in first.values()]
    assert signs == [True, False], "the first batch trains, too"
    second = take(pool, 1)
    assert list(second) == ["c"] and second["c"].advantage > 0
    assert take(pool, 2) == {}


def test_a_sample_too_far_from_the_policy_is_accounted_for_as_stale(pool):
    pool.add(joined("old", version=0))
    pool.add(joined("new", version=2))
    assert all(entry.outcome.is_trained for entry in pool.entries()), "age alone says nothing"
    pool.leave_out("old", Outcome.STALE)
    entries = take(pool, 2)
    assert (entries["old"].outcome, entries["old"].advantage) == (Outcome.STALE, 0.0)
    assert entries["new"].outcome is Outcome.SOLVED


@pytest.mark.parametrize("retracted_first", [False, True])
def test_a_sample_waits_while_its_feedback_is_taken_back(pool, retracted_first):
    events = [(pool.add, joined("a")), (pool.retract, retracted("a"))]
    for handle, event in reversed(events) if retracted_first else events:
        handle(event)
    assert take(pool, 0) == {}
    pool.add(revised("a", 1, None))
    assert take(pool, 1)["a"].outcome is Outcome.CANCELLED
    pool.add(revised("a", 2, 0.0))
    down = take(pool, 2)["a"]
    assert down.outcome is Outcome.FAILED and not down.is_change and down.advantage < 0


def test_retracting_one_of_two_keeps_the_sample(pool):
    """The pool looked at the request, and lost the sample."""
    two = msgspec.structs.replace(joined("a"), feedback_ids=["f-a", "g-a"])
    pool.add(two)
    pool.retract(retracted("a"))
    pool.add(msgspec.structs.replace(two, revision=1, feedback_ids=["g-a"]))
    assert take(pool, 0)["a"].outcome is Outcome.SOLVED


def test_a_trained_sample_does_not_come_back(pool):
    pool.add(joined("a"))
    take(pool, 0)
    pool.add(joined("a"))
    assert take(pool, 1) == {}


def test_a_revision_takes_the_place_of_one_that_waits(pool):
    pool.add(joined("a", 1.0))
    pool.add(revised("a", 1, 0.0))
    pool.add(joined("a", 1.0))
    entry = take(pool, 0)["a"]
    assert (entry.revision, entry.reward, entry.is_change) == (1, 0.0, False)


def test_after_training_a_revision_trains_the_change_once(pool):
    pool.add(joined("a", 1.0))
    first = take(pool, 0)["a"]
    pool.add(revised("a", 1, 0.25))
    second = take(pool, 1)["a"]
    assert second.is_change and second.advantage == pytest.approx(-0.75)
    pool.add(revised("a", 1, 0.25))
    assert take(pool, 2) == {}
    pool.add(revised("a", 2, None))
    back = take(pool, 3)["a"]
    assert back.is_change
    assert first.advantage + second.advantage + back.advantage == pytest.approx(0.0)
    pool.add(revised("a", 3, 1.0))
    again = take(pool, 4)["a"]
    assert again.advantage == pytest.approx(first.advantage)


def test_a_revision_that_changes_no_reward_trains_nothing(pool):
    pool.add(joined("a", 1.0))
    take(pool, 0)
    pool.add(msgspec.structs.replace(revised("a", 1, 1.0), feedback_ids=["f-a", "g-a"]))
    assert take(pool, 1)["a"].outcome is Outcome.FILTERED


def test_the_manifest_in_flight_does_not_swallow_a_newer_revision(pool):
    pool.add(joined("a", 1.0))
    entries = pool.entries()
    pool.add(revised("a", 1, 0.0))
    pool.commit(BatchManifest(step=1, policy_version=0, groups=[], live=entries))
    assert take(pool, 1)["a"].is_change


def test_each_turn_gets_its_own_advantage(pool):
    event = msgspec.structs.replace(
        joined("a", 0.5),
        request_ids=["a", "b", "c"],
        turns=joined("a").turns * 3,
        turn_rewards=[0.25, 0.0, -0.25],
        unrated=[1],
    )
    pool.add(event)
    entry = take(pool, 0)["a"]
    up, none, down = entry.turn_advantages
    assert (up > 0, none, down < 0) == (True, 0.0, True)
    assert up - down == pytest.approx(0.5 * entry.share)
    pool.add(msgspec.structs.replace(event, revision=1, turn_rewards=[], unrated=[], reward=0.75))
    change = take(pool, 1)["a"]
    assert change.turn_advantages[0] == 0.0
    assert change.turn_advantages[2] == pytest.approx(0.5 * entry.share * change.share)


def test_a_sample_that_cannot_be_trained_is_accounted_for(pool):
    pool.add(joined("bad"))
    pool.add(joined("good"))
    pool.leave_out("bad", Outcome.INFRASTRUCTURE_ERROR)
    pool.leave_out("unknown", Outcome.STALE)
    entries = take(pool, 0)
    assert entries["bad"].outcome is Outcome.INFRASTRUCTURE_ERROR
    assert entries["good"].outcome is Outcome.SOLVED


def test_more_traffic_buys_no_more_of_a_batch():
    """Admission in the order of arrival gave one key with five times the traffic the policy."""
    pool = LiveSamples(TrainerConfig(live=LiveConfig(num_samples_max=6), staleness_max=9))
    for number in range(15):
        pool.add(joined(f"loud{number}", 0.0, user="loud"))
        if number % 5 == 0:
            pool.add(joined(f"a{number}", user="a"))
            pool.add(joined(f"b{number}", user="b"))
    batches = [take(pool, version) for version in range(3)]
    assert [sum(entry.user == "loud" for entry in batch.values()) for batch in batches] == [2, 2, 5]
    assert [len(batch) for batch in batches] == [6, 4, 5]


def test_who_waited_longest_begins():
    pool = LiveSamples(TrainerConfig(live=LiveConfig(num_samples_max=2), staleness_max=9))
    for user in "abc":
        for number in range(4):
            pool.add(joined(f"{user}{number}", user=user))
    assert ["".join(take(pool, version)) for version in range(3)] == ["a0b0", "c0a1", "b1c1"]


def test_above_its_room_a_user_s_oldest_samples_are_left_out_and_say_so(pool):
    for number in range(5):
        pool.add(joined(f"loud{number}", user="loud"))
    pool.add(joined("quiet", user="quiet"))
    entries = take(pool, 0)
    capped = [name for name, entry in entries.items() if entry.outcome is Outcome.CAPPED]
    assert capped == ["loud0", "loud1"]
    assert "quiet" in entries and not entries["loud0"].outcome.is_trained


def test_a_manifest_lists_a_bounded_number_of_samples_left_out(pool, monkeypatch):
    monkeypatch.setattr("penstock.actors.trainer.batching.live.NUM_LEFT_OUT_MAX", 2)
    for number in range(5):
        pool.add(joined(f"old{number}"))
        pool.leave_out(f"old{number}", Outcome.STALE)
    assert [len(take(pool, 9)) for _ in range(4)] == [2, 2, 1, 0]
