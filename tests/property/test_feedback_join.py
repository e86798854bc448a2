"""The feedback join: the same sample from any order of events."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.feedback.join import FeedbackJoin, JoinConfig
from penstock.messages.base import Array
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.rollout import StopReason, Turn, VersionSpan

EMPTY = Array(dtype="int32", shape=(0,), data=b"")
TURN = Turn(
    context_ids=EMPTY,
    token_ids=EMPTY,
    behavior_logprobs=EMPTY,
    version_spans=[VersionSpan(policy_version=4, num_tokens=9)],
    stop_reason=StopReason.STOP,
)


def record(request_id="q", *, consent=True, key_id="user") -> InferenceRecorded:
    return InferenceRecorded(
        request_id=request_id,
        session_id="s",
        key_id=key_id,
        tenant=key_id,
        training_consent=consent,
        variant="current",
        propensity=0.5,
        turn=TURN,
        policy_version=4,
        replica="west",
    )


def feedback(feedback_id, name="accept", value=1.0, *, key_id="user", amends="", request_id="q"):
    return FeedbackReceived(
        feedback_id=feedback_id,
        request_id=request_id,
        name=name,
        value=value,
        key_id=key_id,
        tenant=key_id,
        amends=amends,
    )


def retracted(feedback_id) -> FeedbackRetracted:
    return FeedbackRetracted(feedback_id=feedback_id, request_id="q", tenant="user")


def apply(join: FeedbackJoin, event, now: float) -> None:
    match event:
        case InferenceRecorded():
            join.add_record(event, now)
        case FeedbackReceived():
            join.add_feedback(event)
        case FeedbackRetracted():
            join.retract(event)


def joined_from(events, config=None) -> list[LiveSampleJoined]:
    join = FeedbackJoin(config or JoinConfig(reward_wait_s=5.0))
    for event in events:
        apply(join, event, 100.0)
    return list(join.due(200.0))


signals = st.lists(
    st.builds(
        feedback,
        st.sampled_from(["f1", "f2", "f3", "f4"]),
        st.sampled_from(["accept", "reject", "thumbs", "tests_passed", "unheard_of"]),
        st.sampled_from([0.0, 0.5, 1.0]),
        key_id=st.sampled_from(["user", "user", "stranger"]),
    ),
    max_size=4,
    unique_by=lambda event: event.feedback_id,
)


@given(st.data(), signals, st.sets(st.sampled_from(["f1", "f2", "f9"])))
def test_any_order_gives_the_same_sample(data, feedbacks, gone):
    events = [record(), *feedbacks, *(retracted(name) for name in sorted(gone))]
    doubled = events + data.draw(st.lists(st.sampled_from(events)))
    shuffled = data.draw(st.permutations(doubled))
    assert joined_from(shuffled) == joined_from(events)


@given(signals)
def test_a_reward_lies_between_zero_and_one_and_strangers_do_not_count(feedbacks):
    for sample in joined_from([record(), *feedbacks]):
        assert 0.0 <= sample.reward <= 1.0
        own = {event.feedback_id for event in feedbacks if event.key_id == "user"}
        assert set(sample.feedback_ids) <= own


def test_the_newest_amendment_counts_wherever_the_first_stands():
    first = feedback("a", "thumbs", 1.0)
    amendments = [
        feedback("a.1", "thumbs", 1.0, amends="a"),
        feedback("a.2", "thumbs", -1.0, amends="a"),
    ]
    for place in range(3):
        chain = [*amendments[:place], first, *amendments[place:]]
        (sample,) = joined_from([record(), *chain])
        assert (sample.reward, sample.feedback_ids) == (0.0, ["a.2"])


def test_a_sample_carries_what_off_policy_evaluation_needs_and_comes_once():
    join = FeedbackJoin(JoinConfig(reward_wait_s=5.0))
    join.add_feedback(feedback("f1"))
    join.add_record(record(), 100.0)
    assert list(join.due(104.9)) == []
    (sample,) = join.due(105.0)
    assert (sample.propensity, sample.variant, sample.policy_version) == (0.5, "current", 4)
    assert sample.turns == [TURN.summary]
    join.add_record(record(), 106.0)
    join.add_feedback(feedback("f2", "reject"))
    assert list(join.due(1e6)) == []
    assert join.counts.num_late == 1


def test_without_consent_nothing_is_joined():
    events = [feedback("f1"), record(consent=False), feedback("f2")]
    assert joined_from(events) == []
    assert joined_from(events, JoinConfig(default_reward=0.5)) == []


def test_late_feedback_joins_a_request_that_still_waits():
    join = FeedbackJoin(JoinConfig(reward_wait_s=5.0, late_s_max=100.0))
    join.add_record(record(), 0.0)
    assert list(join.due(50.0)) == []
    join.add_feedback(feedback("f1", "reject"))
    (sample,) = join.due(60.0)
    assert sample.reward == 0.0


def test_without_feedback_the_default_reward_or_the_drop_comes():
    (sample,) = joined_from([record()], JoinConfig(reward_wait_s=5.0, default_reward=0.25))
    assert (sample.reward, sample.feedback_ids) == (0.25, [])
    join = FeedbackJoin(JoinConfig(reward_wait_s=5.0, late_s_max=50.0))
    join.add_record(record(), 0.0)
    assert list(join.due(50.0)) == []
    assert (join.num_open, join.counts.num_dropped) == (0, 1)


def test_a_restart_does_not_join_again():
    (sample,) = joined_from([record(), feedback("f1")])
    join = FeedbackJoin(JoinConfig(reward_wait_s=0.0))
    join.add_record(record(), 0.0)
    join.add_feedback(feedback("f1"))
    join.note_joined(sample)
    assert list(join.due(10.0)) == []


def test_trusted_keys_may_judge_requests_of_others():
    events = [record(), feedback("ci", "tests_passed", 1.0, key_id="ci")]
    assert joined_from(events) == []
    trusted = msgspec.structs.replace(events[1], is_trusted=True)
    (sample,) = joined_from([events[0], trusted])
    assert sample.reward == 1.0


def test_open_requests_and_orphaned_feedback_are_bounded():
    join = FeedbackJoin(JoinConfig(reward_wait_s=0.0, num_open_max=3))
    for i in range(10):
        join.add_record(record(f"q{i}"), 0.0)
        join.add_feedback(feedback(f"f{i}", request_id=f"q{i}"))
    assert join.num_open == 3
    assert [sample.sample_id for sample in join.due(1.0)] == ["q7", "q8", "q9"]
