"""The feedback join: the same sample from any order of events."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.sealed import sealed_turn

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.join import FeedbackJoin
from penstock.messages.base import Array
from penstock.messages.feedback import (
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.signals.declaration import SignalSpec
from penstock.messages.signals.defaults import DEFAULT_SIGNALS

EMPTY = Array(dtype="int32", shape=(0,), data=b"")
TURN = Turn(
    context_ids=EMPTY,
    token_ids=EMPTY,
    behavior_logprobs=EMPTY,
    version_spans=[VersionSpan(policy_version=4, num_tokens=9)],
    stop_reason=StopReason.STOP,
)


def record(request_id="q", *, consent=True, key_id="user", session_id="s") -> InferenceRecorded:
    return InferenceRecorded(
        request_id=request_id,
        session_id=session_id,
        key_id=key_id,
        tenant=key_id,
        training_consent=consent,
        variant="current",
        propensity=0.5,
        turn=sealed_turn(TURN, request_id),
        policy_version=4,
        replica="west",
    )


def feedback(feedback_id, name="accept", value=1.0, *, key_id="user", request_id="q", **fields):
    return FeedbackReceived(
        feedback_id=feedback_id,
        request_id=request_id,
        name=name,
        value=value,
        key_id=key_id,
        tenant=key_id,
        **fields,
    )


def retracted(feedback_id) -> FeedbackRetracted:
    return FeedbackRetracted(feedback_id=feedback_id, request_id="q", tenant="user")


class Run:
    """A join beside a log that keeps one event of each key."""

    def __init__(self, config: JoinConfig | None = None) -> None:
        self.join = FeedbackJoin(config or JoinConfig())
        self.samples: dict[str, LiveSampleJoined] = {}
        self.left_out: list[FeedbackLeftOut] = []

    def add(self, *events, now: float = 0.0) -> "Run":
        for event in events:
            match event:
                case InferenceRecorded():
                    self.join.add_record(event, now)
                case FeedbackReceived():
                    self.join.add_feedback(event, now)
                case FeedbackRetracted():
                    self.join.retract(event, now)
                case LiveSampleJoined():
                    self.join.note_joined(event, now)
        return self

    def tick(self, now: float) -> list[LiveSampleJoined]:
        found = list(self.join.due(now))
        for event in found:
            self.samples.setdefault(event.key(), event)
            self.join.note_joined(self.samples[event.key()], now)
        self.left_out += self.join.left_out()
        return found

    @property
    def reasons(self) -> dict[str, str]:
        return {event.feedback_id: str(event.reason) for event in self.left_out}


def joined_from(events, config=None) -> list[LiveSampleJoined]:
    return Run(config).add(*events, now=100.0).tick(200.0)


names = st.sampled_from(["accept", "reject", "thumbs", "tests_passed", "unheard_of"])
signals = st.lists(
    st.builds(
        feedback,
        st.sampled_from(["f1", "f2", "f3", "f4"]),
        names,
        st.sampled_from([0.0, 1.0]),
        key_id=st.sampled_from(["user", "user", "stranger"]),
    ),
    max_size=4,
    unique_by=(lambda event: event.feedback_id, lambda event: event.name),
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
        own = {event.key() for event in feedbacks if event.key_id == "user"}
        assert set(sample.feedback_ids) <= own


@given(
    st.lists(
        st.one_of(
            st.builds(
                feedback,
                st.sampled_from(["f1", "f2", "f3"]),
                st.just("thumbs"),
                st.sampled_from([0.0, 1.0]),
                user=st.sampled_from(["u1", "u2"]),
            ),
            st.builds(retracted, st.sampled_from(["f1", "f2", "f3"])),
            st.just("tick"),
            st.just("restart"),
        ),
        max_size=12,
    )
)
def test_the_newest_revision_is_what_all_events_at_once_would_give(story):
    """Through any revisions and restarts; and a retraction leaves what others said."""
    run, past, now = Run(), [record()], 0.0
    run.add(*past)
    for item in [*story, "tick"]:
        now += 100.0
        if item == "tick":
            run.tick(now)
        elif item == "restart":
            samples = run.samples
            run = Run()
            run.samples = samples
            run.add(*past, *samples.values(), now=now)
        else:
            known = {event.key() for event in past if isinstance(event, FeedbackReceived)}
            if isinstance(item, FeedbackRetracted) or item.key() not in known:
                past.append(item)
                run.add(item, now=now)
    run.tick(now + 100.0)
    expected = joined_from(past)
    newest = max(run.samples.values(), key=lambda event: event.revision, default=None)
    if expected:
        assert newest is not None
        assert msgspec.structs.replace(newest, revision=0) == expected[0]
    elif newest is not None:
        assert (newest.unrated, newest.feedback_ids) == ([0], [])


def test_the_newest_amendment_counts_wherever_the_first_stands():
    first = feedback("a", "thumbs", 1.0)
    amendments = [
        feedback("a.1", "thumbs", 1.0, amends="a"),
        feedback("a.2", "thumbs", -1.0, amends="a"),
    ]
    for place in range(3):
        chain = [*amendments[:place], first, *amendments[place:]]
        (sample,) = joined_from([record(), *chain])
        assert (sample.reward, sample.feedback_ids) == (0.0, ["user.a"])


def test_a_sample_carries_what_off_policy_evaluation_needs_and_comes_once():
    run = Run(JoinConfig(reward_wait_s=5.0))
    run.add(feedback("f1"), record(), now=100.0)
    assert run.tick(104.9) == []
    (sample,) = run.tick(105.0)
    assert (sample.propensity, sample.variant, sample.policy_version) == (0.5, "current", 4)
    assert sample.turns == [TURN.summary]
    run.add(record(), now=106.0)
    assert run.tick(1e5) == []


def test_a_later_signal_revises_the_sample_and_nothing_else_does():
    run = Run().add(record(), feedback("f1", "thumbs", 1.0))
    (first,) = run.tick(10.0)
    run.add(feedback("f2", "undo", 1.0), now=500.0)
    (second,) = run.tick(510.0)
    assert (second.sample_id, second.revision, second.request_ids) == ("q", 1, ["q"])
    assert (first.reward, second.reward) == (1.0, 0.5)
    run.add(retracted("f2"), now=600.0)
    (third,) = run.tick(610.0)
    assert (third.revision, third.reward, third.feedback_ids) == (2, 1.0, ["user.f1"])
    run.add(retracted("f1"), now=700.0)
    (gone,) = run.tick(710.0)
    assert (gone.revision, gone.unrated, gone.feedback_ids) == (3, [0], [])
    run.add(feedback("f3", "thumbs", 0.0), now=800.0)
    (down,) = run.tick(810.0)
    assert (down.revision, down.reward, down.unrated) == (4, 0.0, [])
    assert run.tick(1e5) == []


def test_revisions_are_bounded_and_what_is_above_is_left_out():
    run = Run(JoinConfig(revisions_max=2)).add(record(), feedback("f1", "thumbs", 1.0))
    for step, name in enumerate(("undo", "retry", "interrupted")):
        run.tick(step * 100.0 + 50.0)
        run.add(feedback(f"g{step}", name, 1.0), now=step * 100.0 + 60.0)
    run.tick(1000.0)
    assert list(run.samples) == ["q.0", "q.1"]
    assert run.reasons == {"g1": "capped", "g2": "capped"}


def test_a_signal_is_not_believed_before_it_matures():
    run = Run().add(record(), feedback("f1", "keep_rate_1d", 1.0))
    assert run.tick(86_399.0) == []
    (sample,) = run.tick(86_401.0)
    assert sample.reward == 1.0


def test_a_session_is_one_sample_and_its_reward_reaches_all_turns():
    run = Run().add(*(record(f"q{i}") for i in range(6)))
    run.add(feedback("f1", "tests_passed", 1.0, request_id="q5"))
    (sample,) = run.tick(10.0)
    assert sample.request_ids == [f"q{i}" for i in range(6)]
    assert (sample.reward, sample.turn_rewards, sample.unrated) == (1.0, [], [])
    assert sample.evidence == ["q1", "q2", "q3", "q4", "q5", ""]
    run.add(feedback("f2", "thumbs", 0.0, request_id="q2"), now=20.0)
    (revised,) = run.tick(30.0)
    whole = [revised.reward + added for added in revised.turn_rewards]
    assert [round(value, 6) for value in whole] == [1.0, 1.0, round(2 / 3, 6), 1.0, 1.0, 1.0]


def test_a_turn_s_own_signal_reaches_no_other_turn():
    run = Run().add(*(record(f"q{i}") for i in range(3)))
    run.add(feedback("f1", "thumbs", 1.0, request_id="q2"))
    (sample,) = run.tick(10.0)
    assert (sample.reward, sample.unrated) == (1.0, [0, 1])


def test_turns_after_a_sample_are_another_and_a_session_signal_reaches_both():
    run = Run().add(record("q0"), feedback("f0", "thumbs", 1.0, request_id="q0"))
    run.tick(10.0)
    run.add(record("q1"), record("q2"), now=20.0)
    run.add(feedback("f1", "pr_merged", 0.0, request_id="q2"), now=20.0)
    revised, second = run.tick(30.0)
    assert (revised.key(), second.key()) == ("q0.1", "q1.0")
    assert (second.request_ids, second.reward) == (["q1", "q2"], 0.0)
    assert revised.reward < 0.5
    assert run.tick(1e5) == []


def test_sessions_of_two_tenants_never_meet():
    run = Run().add(record("q0"), record("q1", key_id="other"))
    run.add(feedback("f", "tests_passed", 1.0, request_id="q0"))
    (sample,) = run.tick(10.0)
    assert (sample.request_ids, sample.tenant) == (["q0"], "user")


def test_without_consent_nothing_is_joined():
    events = [feedback("f1"), record(consent=False), feedback("f2")]
    assert joined_from(events) == []
    assert joined_from(events, JoinConfig(default_reward=0.5)) == []


def test_late_feedback_joins_a_request_that_still_waits():
    run = Run().add(record())
    assert run.tick(50.0) == []
    run.add(feedback("f1", "reject"), now=3 * 86_400.0)
    (sample,) = run.tick(3 * 86_400.0 + 10)
    assert sample.reward == 0.0


def test_without_feedback_the_default_reward_comes_and_feedback_takes_its_place():
    run = Run(JoinConfig(default_reward=0.25)).add(record())
    (sample,) = run.tick(10.0)
    assert (sample.reward, sample.feedback_ids) == (0.25, [])
    assert run.tick(100.0) == []
    run.add(feedback("f1"), now=200.0)
    (revised,) = run.tick(210.0)
    assert (revised.key(), revised.reward) == ("q.1", 1.0)


def test_a_forgotten_request_s_feedback_is_left_out_with_the_reason():
    quick = tuple(spec for spec in DEFAULT_SIGNALS if not spec.maturity_s)
    run = Run(JoinConfig(signals=quick, late_s_max=50.0)).add(record())
    assert run.tick(50.0) == []
    assert (run.join.num_open, run.join.counts.num_dropped) == (0, 1)
    run.add(feedback("f1"), now=60.0)
    run.add(record("q2", consent=False), feedback("f2", request_id="q2"), now=60.0)
    run.add(feedback("f5", request_id="q5"), now=60.0)
    run.join.add_counted("q5")
    run.add(record("q3"), feedback("f3", request_id="q3", key_id="stranger"), now=60.0)
    run.add(feedback("f4", "nonsense", request_id="q3"), now=60.0)
    assert run.tick(70.0) == []
    expected = {"f1": "late", "f2": "no_consent", "f3": "not_allowed", "f4": "undeclared"} | {
        "f5": "no_consent"
    }
    assert run.reasons == expected


def test_trusted_keys_may_judge_requests_of_others():
    ci = feedback("ci", "tests_passed", 1.0, key_id="ci")
    assert joined_from([record(), ci]) == []
    (sample,) = joined_from([record(), msgspec.structs.replace(ci, is_trusted=True)])
    assert (sample.reward, sample.feedback_ids) == (1.0, ["ci.ci"])


def test_a_signal_for_trusted_senders_counts_from_no_other():
    signals = (SignalSpec(name="graded", trusted_only=True),)
    run = Run(JoinConfig(signals=signals)).add(record(), feedback("f1", "graded", 1.0))
    assert run.tick(10.0) == []
    assert run.reasons == {"f1": "not_allowed"}


def test_open_requests_and_orphaned_feedback_are_bounded():
    run = Run(JoinConfig(reward_wait_s=0.0, num_open_max=3))
    for i in range(10):
        run.add(record(f"q{i}", session_id=f"s{i}"), feedback(f"f{i}", request_id=f"q{i}"))
    assert run.join.num_open == 3
    assert [sample.sample_id for sample in run.tick(1.0)] == ["q7", "q8", "q9"]
    run.add(*(feedback(f"g{i}", request_id=f"z{i}") for i in range(10)))
    run.tick(2.0)
    assert run.reasons["g6"] == "unknown_request"
    assert "g7" not in run.reasons
