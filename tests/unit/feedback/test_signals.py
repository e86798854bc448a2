"""Declared signals: what a value is worth, and what several are worth together."""

import msgspec
import pytest

from penstock.actors.feedback.config import JoinConfig
from penstock.actors.feedback.join import FeedbackJoin
from penstock.actors.feedback.sessions import reward_of
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded
from penstock.messages.rollout import StoredTurn, TurnSummary
from penstock.messages.signals.declaration import by_name
from penstock.messages.signals.defaults import DEFAULT_SIGNALS

DECLARED = by_name(DEFAULT_SIGNALS)


def signal(name, value=1.0, *, number=0, **fields) -> FeedbackReceived:
    return FeedbackReceived(
        feedback_id=f"{name}-{number}",
        request_id="q",
        name=name,
        value=value,
        key_id="k",
        tenant="t",
        **fields,
    )


def reward(*signals) -> float | None:
    return reward_of(signals, DECLARED)


@pytest.mark.parametrize("name", ["pr_merged", "commit", "thumbs"])
def test_what_did_not_happen_is_not_a_success(name):
    assert reward(signal(name, 1.0)) == 1.0
    assert reward(signal(name, 0.0)) == 0.0


@pytest.mark.parametrize("name", ["undo", "retry", "dissatisfied_followup", "interrupted"])
def test_a_complaint_that_was_not_made_is_none(name):
    happened, not_happened = reward(signal(name, 1.0)), reward(signal(name, 0.0))
    assert happened is not None and not_happened is not None
    assert happened < 0.5 < not_happened


def test_a_weak_lone_signal_is_close_to_neutral():
    assert reward(signal("accept", weight=0.01)) == pytest.approx(0.505)
    assert reward(signal("accept", 0.0, weight=0.01)) == pytest.approx(0.495)
    assert reward(signal("accept", weight=0.0)) is None
    assert reward(signal("comment", value=0.0)) is None


def test_no_number_of_accepts_outvotes_a_trusted_failed_test():
    failed = signal("tests_passed", 0.0, is_trusted=True)
    accepts = [signal("accept", number=n, user=f"u{n}") for n in range(64)]
    value = reward(failed, *accepts)
    assert value is not None and value < 0.4
    assert reward(failed, accepts[0]) == pytest.approx(1 / 3)


def test_of_one_user_s_accepts_the_latest_counts_alone():
    summary = TurnSummary(num_context=1, num_sampled=1, version_spans=[])
    turn = StoredTurn(object_key="o", num_bytes=1, blake3="b", summary=summary)
    record = InferenceRecorded(
        request_id="q",
        session_id="q",
        key_id="k",
        tenant="t",
        training_consent=True,
        variant="v",
        propensity=1.0,
        turn=turn,
        policy_version=0,
        replica="r",
    )
    join = FeedbackJoin(JoinConfig())
    join.add_record(record, 0.0)
    join.add_feedback(signal("undo", 1.0), 0.0)
    for number in range(64):
        join.add_feedback(signal("accept", float(number < 63), number=number), 0.0)
    (sample,) = join.due(10.0)
    assert sample.feedback_ids == ["t.accept-63", "t.undo-0"]
    assert sample.reward == 0.0


def test_a_declaration_that_makes_no_sense_is_refused():
    twice = msgspec.toml.decode('signals = [{ name = "a" }, { name = "a" }]')
    with pytest.raises(msgspec.ValidationError, match=r"signals\.a: declared twice"):
        msgspec.convert(twice, JoinConfig)
    late = '[[signals]]\nname = "slow"\nmaturity_s = 1e9\n'
    with pytest.raises(
        msgspec.ValidationError, match=r"signals\.slow\.maturity_s: expected less than"
    ):
        msgspec.convert(msgspec.toml.decode(late), JoinConfig)
    for wrong in ('name = "A B"', 'name = "a"\nkind = "vibes"', 'name = "a"\nweigth = 1'):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(msgspec.toml.decode(f"[[signals]]\n{wrong}\n"), JoinConfig)
