"""Bursts of feedback, trust from agreement, pairs and labels: the pure parts."""

import random

import msgspec
import pytest
from tests.sealed import sealed_turn

from penstock.actors.feedback.bursts import Bursts
from penstock.actors.feedback.config import BurstConfig, JoinConfig
from penstock.actors.feedback.preferences import Preferences
from penstock.actors.feedback.trust import Trust
from penstock.messages.base import Array
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.reading.sealed import Sealed
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.signals.quarantine import QuarantineReleased

EMPTY = Array(dtype="int32", shape=(0,), data=b"")
TURN = Turn(
    context_ids=EMPTY,
    token_ids=EMPTY,
    behavior_logprobs=EMPTY,
    version_spans=[VersionSpan(policy_version=4, num_tokens=9)],
    stop_reason=StopReason.STOP,
)
HOUR = 3600.0


def record(request_id="q", *, consent=True) -> InferenceRecorded:
    return InferenceRecorded(
        request_id=request_id, session_id="s", key_id="k", tenant="t", user="u",
        training_consent=consent, variant="current", propensity=1.0,
        turn=sealed_turn(TURN, request_id), policy_version=4, replica="west",
    )  # fmt: skip


def feedback(name="accept", *, number=0, request_id="q", user="u", value=1.0, **fields):
    return FeedbackReceived(
        feedback_id=f"f{number}", request_id=request_id, name=name, value=value, key_id="k",
        tenant="t", user=user, **fields,
    )  # fmt: skip


def sample(*roots: str, user="u") -> LiveSampleJoined:
    return LiveSampleJoined(
        sample_id="q", request_ids=["q"], turns=[TURN.summary], reward=1.0, tenant="t", user=user,
        feedback_ids=list(roots), variant="current", propensity=1.0, policy_version=4,
    )  # fmt: skip


def test_a_burst_is_held_until_it_is_released():
    bursts = Bursts(BurstConfig(num_min=10))
    found = [bursts.add(feedback(number=number), 1000.0 + number) for number in range(50)]
    (quarantined,) = [event for event in found if event is not None]
    assert (found.index(quarantined), quarantined.num_signals) == (10, 11)
    assert bursts.num_held == 40
    assert bursts.holds(sample("t.f20")) and bursts.holds(sample("t.f1", "t.f49"))
    assert not bursts.holds(sample("t.f1"))
    bursts.release(QuarantineReleased(quarantine=quarantined.key()))
    assert not bursts.holds(sample("t.f20"))
    bursts.add(feedback(number=60), 1060.0)
    assert bursts.num_held == 0, "the rest of a burst that was released counts, too"


@pytest.mark.parametrize("is_known_before", [False, True])
def test_a_busy_user_is_released_once(is_known_before):
    """As a key is whose client names no user; a join that starts again may read this first."""
    bursts = Bursts(BurstConfig(num_min=10, ratio=4.0))
    release = QuarantineReleased(quarantine="t.u.1")
    if is_known_before:
        bursts.release(release)
    for number in range(50):
        bursts.add(feedback(number=number), 700.0)
    bursts.release(release)
    for window in (2, 3):
        for number in range(190):
            assert bursts.add(feedback(number=1000 * window + number), window * 600.0) is None
    found = [bursts.add(feedback(number=9000 + number), 2400.0) for number in range(800)]
    assert [number for number, event in enumerate(found) if event] == [760], "4 x 190"


def test_another_user_s_burst_holds_nobody_else_s_feedback():
    bursts = Bursts(BurstConfig(num_min=10))
    for number in range(50):
        bursts.add(feedback(number=number, user="loud"), 1000.0)
        bursts.add(feedback(number=100 + number // 10, user=f"u{number % 10}"), 1000.0)
    assert bursts.num_held == 40
    assert not bursts.holds(sample("t.f100"))


def test_a_trusted_key_and_a_user_who_was_busy_before_make_no_burst():
    bursts = Bursts(BurstConfig(num_min=10, ratio=4.0))
    for number in range(500):
        assert bursts.add(feedback(number=number, is_trusted=True), 1000.0) is None
    for window in range(8):
        for number in range(min(10, 3 * window)):
            assert bursts.add(feedback(number=number), window * 600.0) is None
    assert all(bursts.add(feedback(number=number), 6000.0) is None for number in range(40))
    assert bursts.add(feedback(number=99), 6000.0) is not None


def test_honest_users_who_drift_are_rarely_held():
    """Users of all sizes, with days and nights, moods, busier weeks: the false alarms of 40."""
    rng = random.Random(3)
    num_held = 0
    for user in range(40):
        bursts = Bursts(BurstConfig())
        hourly = rng.lognormvariate(1.5, 1.2)
        growth = rng.uniform(0.5, 2.0)
        is_held = False
        for hour in range(7 * 24):
            by_day = max(0.05, 1.0 - abs((hour % 24) - 14) / 10)
            rate = hourly * by_day * growth ** (hour / 168) * rng.lognormvariate(0.0, 0.5)
            num_signals = int(rng.expovariate(1.0 / rate))
            for number in range(num_signals):
                at = (hour + number / num_signals) * HOUR
                is_held |= bursts.add(feedback(number=number, user=str(user)), at) is not None
        num_held += is_held
    assert num_held / 40 < 0.05


def test_who_contradicts_verified_signals_loses_all_weight_and_honest_users_none():
    trust, rng = Trust(JoinConfig()), random.Random(0)
    for number in range(60):
        is_good = rng.random() < 0.5
        name = f"q{number}"
        honest = is_good == (rng.random() < 0.9)
        given = [
            feedback("accept" if honest else "reject", request_id=name, user="honest"),
            feedback("reject" if is_good else "accept", request_id=name, user="hostile"),
            feedback("tests_passed", value=float(is_good), request_id=name, is_trusted=True),
        ]
        rng.shuffle(given)
        for event in given:
            trust.add(event)
    assert trust.weight(sample(user="honest")) == 1.0
    assert trust.weight(sample(user="hostile")) == 0.0
    assert trust.weight(sample(user="unknown")) == 1.0


def test_a_user_who_judges_a_request_twice_is_compared_once():
    trust = Trust(JoinConfig())
    trust.add(feedback("tests_passed", value=1.0, is_trusted=True))
    for number in range(100):
        trust.add(feedback("accept", number=number))
    trust.add(feedback("tests_passed", value=0.0, is_trusted=True))
    assert trust._agreed[("t", "u")] == [1, 1]


@pytest.mark.parametrize("is_early", [False, True])
def test_corrections_and_judgments_become_pairs_and_labels(is_early):
    preferences = Preferences(JoinConfig())
    content = Sealed(owner="t/u", key_id="1", data=b"")
    events = [
        feedback("accept", number=1, weight=0.5),
        feedback("reject", number=2),
        feedback("correction", number=3, content=content),
        feedback("comment", number=4, content=content),
        feedback("keep_rate_1d", number=5, value=0.5),
        feedback("thumbs"),
    ]
    found = [] if is_early else list(preferences.add_record(record()))
    for event in events:
        found += preferences.add_feedback(event)
    found += preferences.add_record(record()) if is_early else []
    labels = {label.feedback: label for label in found if isinstance(label, Label)}
    (pair,) = [event for event in found if isinstance(event, PreferencePair)]
    assert (pair.feedback, pair.root, pair.request_id) == ("t.f3", "t.f3", "q")
    assert set(labels) == {"t.f1", "t.f2", "t.f0"}
    assert labels["t.f1"].is_desirable and not labels["t.f2"].is_desirable
    assert labels["t.f1"].weight == labels["t.f2"].weight / 2


def test_what_may_not_be_trained_makes_no_pair_and_an_amendment_names_its_root():
    preferences = Preferences(JoinConfig())
    list(preferences.add_record(record(consent=False)))
    list(preferences.add_record(record("other")))
    assert list(preferences.add_feedback(feedback("accept"))) == []
    stranger = msgspec.structs.replace(feedback("accept", request_id="other"), tenant="x")
    assert list(preferences.add_feedback(stranger)) == []
    amended = feedback("accept", number=2, request_id="other", value=0.0, amends="f1")
    (label,) = preferences.add_feedback(amended)
    assert (label.feedback, label.root, label.is_desirable) == ("t.f2", "t.f1", False)
