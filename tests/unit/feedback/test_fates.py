"""What `GET /v1/feedback/{id}` tells, at each moment of a story."""

import msgspec

from penstock.gateway.fates import FeedbackFates
from penstock.messages.feedback import (
    FeedbackLeftOut,
    FeedbackReceived,
    FeedbackRetracted,
    LeftOutReason,
    LiveSampleJoined,
)
from penstock.messages.reward import Outcome
from penstock.messages.signals.preferences import (
    PreferenceEntry,
    PreferenceFate,
    PreferenceKind,
)
from penstock.messages.signals.quarantine import FeedbackQuarantined, QuarantineReleased
from penstock.messages.training import BatchManifest, SampleEntry, StepCompleted

SAMPLE = LiveSampleJoined(
    sample_id="q",
    request_ids=["q"],
    turns=[],
    reward=1.0,
    feedback_ids=["t.a"],
    variant="v",
    propensity=1.0,
    policy_version=0,
)


def received(name, **fields) -> FeedbackReceived:
    return FeedbackReceived(
        feedback_id=name,
        request_id="q",
        name="thumbs",
        value=1.0,
        key_id="k",
        tenant="t",
        **fields,
    )


def batch(step, outcome=Outcome.SOLVED, revision=0) -> BatchManifest:
    entry = SampleEntry(
        rollout_id="q",
        revision=revision,
        outcome=outcome,
        reward=1.0,
        advantage=0.5,
        version_spans=[],
    )
    return BatchManifest(step=step, policy_version=step - 1, groups=[], live=[entry])


def step(number, skipped="") -> StepCompleted:
    return StepCompleted(
        step=number,
        policy_version=number,
        weights_digest="",
        optimizer_digest="",
        metrics={},
        skipped=skipped,
    )


def revised(revision, *counting) -> LiveSampleJoined:
    return msgspec.structs.replace(SAMPLE, revision=revision, feedback_ids=list(counting))


def status(fates, key="t.a"):
    fate = fates.fate(key)
    return fate["status"], fate["versions"]


def test_a_signal_s_way_to_a_version_and_back():
    fates = FeedbackFates()
    assert status(fates) == ("unknown", [])
    fates.received(received("a"), 10.0)
    assert status(fates) == ("waiting", [])
    fates.joined(SAMPLE)
    assert status(fates) == ("joined", [])
    fates.batch(batch(3))
    assert status(fates) == ("training", [])
    fates.step(step(3))
    assert status(fates) == ("trained", [3])
    fates.received(received("b"), 10.0)
    fates.joined(revised(1, "t.a", "t.b"))
    assert status(fates, "t.b") == ("joined", [])
    fates.batch(batch(5, revision=1))
    fates.step(step(5))
    assert status(fates, "t.b") == ("trained", [5])
    assert status(fates) == ("trained", [3, 5])
    fates.retracted(FeedbackRetracted(feedback_id="a", request_id="q", tenant="t"))
    assert status(fates) == ("retracted", [3, 5])


def test_what_is_not_trained_says_why():
    fates = FeedbackFates()
    fates.received(received("a"), 10.0)
    fates.joined(SAMPLE)
    fates.batch(batch(1, Outcome.STALE))
    fates.step(step(1))
    assert fates.fate("t.a") == {
        "status": "stale",
        "versions": [],
        "samples": [{"sample_id": "q", "status": "stale", "versions": []}],
        "reason": "stale",
    }
    fates.joined(revised(1, "t.a"))
    fates.batch(batch(2, revision=1))
    fates.step(step(2, skipped="the loss is nan"))
    assert status(fates) == ("skipped", [])
    fates.joined(revised(2, "t.c"))
    assert status(fates) == ("superseded", [])


def test_a_judgment_is_trained_beside_a_sample_that_cannot_be():
    fates = FeedbackFates()
    fates.received(received("a"), 10.0)
    fates.received(received("a.1", amends="a"), 11.0)
    fates.joined(SAMPLE)
    fates.batch(batch(1, Outcome.NOT_REPRODUCIBLE))
    assert status(fates) == ("not_reproducible", [])
    entry = PreferenceEntry(
        kind=PreferenceKind.LABEL,
        fate=PreferenceFate.TRAINED,
        feedback="t.a.1",
        request_id="q",
        tenant="t",
        user="u",
    )
    left_out = msgspec.structs.replace(entry, fate=PreferenceFate.CAPPED)
    for number, found in ((2, left_out), (3, entry), (4, entry)):
        fates.batch(BatchManifest(step=number, policy_version=0, groups=[], preferences=[found]))
    fates.step(step(2))
    assert status(fates) == ("training", [])
    fates.step(step(3, skipped="the loss is nan"))
    assert status(fates) == ("training", [])
    fates.step(step(4))
    assert status(fates) == ("trained", [4])
    fates.retracted(FeedbackRetracted(feedback_id="a", request_id="q", tenant="t"))
    assert status(fates) == ("retracted", [4])


def test_a_signal_that_changes_nothing_says_so():
    fates = FeedbackFates()
    fates.joined(SAMPLE)
    fates.batch(batch(1))
    fates.step(step(1))
    fates.joined(revised(1, "t.a", "t.b"))
    fates.batch(batch(2, Outcome.FILTERED, revision=1))
    assert status(fates, "t.b") == ("unchanged", [])
    assert status(fates) == ("trained", [1])


def test_what_the_join_leaves_out_is_refused_or_capped():
    fates = FeedbackFates()
    for name, reason in (("a", LeftOutReason.LATE), ("b", LeftOutReason.CAPPED)):
        fates.received(received(name), 10.0)
        fates.left_out(FeedbackLeftOut(feedback_id=name, request_id="q", tenant="t", reason=reason))
    assert (status(fates)[0], fates.fate("t.a")["reason"]) == ("refused", "late")
    assert status(fates, "t.b") == ("capped", [])


def test_the_tables_are_bounded_and_an_amendment_is_no_new_feedback():
    fates = FeedbackFates(num_max=2)
    fates.received(received("a"), 10.0)
    fates.received(received("a.1", amends="a"), 10.0)
    assert status(fates, "t.a.1") == ("unknown", [])
    fates.received(received("b"), 10.0)
    fates.received(received("c"), 10.0)
    assert status(fates) == ("unknown", [])
    assert status(fates, "t.c") == ("waiting", [])


def burst(user="u", window=2):
    return FeedbackQuarantined(
        tenant="t", user=user, window=window, began_at=window * 100.0 + 50.0,
        ends_at=window * 100.0 + 100.0, num_signals=9, usual=1.0,
    )  # fmt: skip


def test_feedback_of_a_burst_is_quarantined_until_it_is_released():
    fates = FeedbackFates()
    fates.received(received("before", user="u"), 249.0)
    fates.received(received("a", user="u"), 260.0)
    fates.quarantined(burst())
    fates.received(received("b", user="u"), 299.0)
    fates.received(received("after", user="u"), 300.0)
    fates.received(received("other", user="v"), 260.0)
    fates.received(received("trusted", user="u", is_trusted=True), 260.0)
    assert fates.fate("t.a")["status"] == "quarantined"
    assert fates.fate("t.b")["reason"] == burst().key()
    for name in ("before", "after", "other", "trusted"):
        assert status(fates, f"t.{name}") == ("waiting", []), name
    fates.released(QuarantineReleased(quarantine=burst().key()))
    assert status(fates, "t.b") == ("waiting", [])


def test_an_amendment_in_a_burst_holds_what_it_amends_but_not_what_was_joined():
    fates = FeedbackFates()
    fates.received(received("a", user="u"), 10.0)
    fates.received(received("a.1", amends="a", user="u"), 260.0)
    for second in range(20):
        fates.received(received(f"a.{second}", amends="a", user="u"), 400.0 + second)
    fates.quarantined(burst())
    assert status(fates) == ("waiting", []), "the newest times of many are known"
    fates.received(received("b", user="u"), 10.0)
    fates.received(received("b.1", amends="b", user="u"), 260.0)
    assert status(fates, "t.b") == ("quarantined", [])
    fates.joined(revised(0, "t.b"))
    assert status(fates, "t.b") == ("joined", [])
    fates.retracted(FeedbackRetracted(feedback_id="b", request_id="q", tenant="t"))
    assert status(fates, "t.b") == ("retracted", [])


def test_bursts_are_bounded():
    fates = FeedbackFates(num_max=2)
    for window in range(2, 6):
        fates.quarantined(burst(window=window))
    fates.received(received("a", user="u"), 260.0)
    assert status(fates) == ("waiting", [])
    fates.received(received("b", user="u"), 560.0)
    assert status(fates, "t.b") == ("quarantined", [])
