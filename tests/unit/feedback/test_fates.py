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
    fates.received(received("a"))
    assert status(fates) == ("waiting", [])
    fates.joined(SAMPLE)
    assert status(fates) == ("joined", [])
    fates.batch(batch(3))
    assert status(fates) == ("training", [])
    fates.step(step(3))
    assert status(fates) == ("trained", [3])
    fates.received(received("b"))
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
    fates.received(received("a"))
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
        fates.received(received(name))
        fates.left_out(FeedbackLeftOut(feedback_id=name, request_id="q", tenant="t", reason=reason))
    assert (status(fates)[0], fates.fate("t.a")["reason"]) == ("refused", "late")
    assert status(fates, "t.b") == ("capped", [])


def test_the_tables_are_bounded_and_an_amendment_is_no_new_feedback():
    fates = FeedbackFates(num_max=2)
    fates.received(received("a"))
    fates.received(received("a.1", amends="a"))
    assert status(fates, "t.a.1") == ("unknown", [])
    fates.received(received("b"))
    fates.received(received("c"))
    assert status(fates) == ("unknown", [])
    assert status(fates, "t.c") == ("waiting", [])
