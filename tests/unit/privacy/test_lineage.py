"""Who trained what, both ways."""

import pytest

from penstock.infra.privacy.lineage import Lineage
from penstock.messages.errors import NotFoundError
from penstock.messages.feedback import (
    FeedbackReceived,
    InferenceCounted,
    InferenceRecorded,
    LiveSampleJoined,
    UserErased,
)
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, StoredTurn, TurnSummary
from penstock.messages.training import BatchManifest, SampleEntry, StepCompleted

SUMMARY = TurnSummary(num_context=1, num_sampled=1, version_spans=[])
TURN = StoredTurn(object_key="o", num_bytes=1, blake3="b", summary=SUMMARY)


def request(name: str, user: str, tenant: str = "acme") -> InferenceRecorded:
    return InferenceRecorded(
        request_id=name, session_id="s", key_id="k", tenant=tenant, user=user, variant="v",
        training_consent=True, propensity=1.0, turn=TURN, policy_version=0, replica="r",
    )  # fmt: skip


def feedback(name: str, request_id: str, tenant: str = "acme") -> FeedbackReceived:
    return FeedbackReceived(
        feedback_id=name, request_id=request_id, name="accept", value=1.0, key_id="k", tenant=tenant
    )


def joined(requests: list[str], user: str, roots: list[str], revision: int = 0, tenant="acme"):
    return LiveSampleJoined(
        sample_id=requests[0], revision=revision, request_ids=requests, turns=[SUMMARY],
        reward=1.0, tenant=tenant, user=user, feedback_ids=roots, variant="v", propensity=1.0,
        policy_version=0,
    )  # fmt: skip


def manifest(step: int, *samples: tuple[str, int, Outcome]) -> BatchManifest:
    live = [
        SampleEntry(
            rollout_id=name, revision=revision, outcome=outcome, reward=1.0, advantage=0.5,
            version_spans=[],
        )
        for name, revision, outcome in samples
    ]  # fmt: skip
    return BatchManifest(step=step, policy_version=step - 1, groups=[], live=live)


EVENTS = [
    manifest(1, ("a1", 0, Outcome.SOLVED)),
    manifest(2, ("b1", 0, Outcome.STALE)),
    manifest(3, ("a1", 1, Outcome.SOLVED), ("c1", 0, Outcome.FAILED)),
    manifest(4, ("d1", 0, Outcome.SOLVED)),
    StepCompleted(
        step=4, policy_version=4, weights_digest="", optimizer_digest="", metrics={}, skipped="nan"
    ),
    *(request(name, user) for name, user in [("a1", "u-a"), ("a2", "u-guest"), ("b1", "u-b")]),
    request("c1", "u-a", tenant="other"),
    request("d1", "u-d"),
    feedback("f1", "a1"),
    feedback("f1", "c1", tenant="other"),
    joined(["a1", "a2"], "u-a", ["acme.f1"]),
    joined(["a1", "a2"], "u-a", ["acme.f1", "acme.f2"], revision=1),
    joined(["b1"], "u-b", []),
    joined(["c1"], "u-a", ["other.f1"], tenant="other"),
    joined(["d1"], "u-d", []),
    UserErased(tenant="acme", user="u-a", key_id="k", step_last=3),
    InferenceCounted(
        request_id="n1", key_id="k", tenant="acme", variant="v", propensity=1.0, turn=SUMMARY,
        stop_reason=StopReason.STOP, policy_version=0, replica="r",
    ),
]  # fmt: skip


@pytest.fixture(params=[EVENTS, EVENTS[::-1]])
def lineage(request) -> Lineage:
    """Streams are not ordered among each other."""
    found = Lineage()
    for event in request.param:
        found.add(event)
    return found


def test_a_version_contains_what_trained_it_and_all_before(lineage):
    (first,), (second,), (third,) = (lineage.find(str(version)) for version in (1, 2, 3))
    assert [sample.sample_id for sample in first.samples] == ["a1"]
    assert second.samples == first.samples
    assert [(each.step, each.sample_id, each.revision) for each in third.samples] == [
        (1, "a1", 0), (3, "a1", 1), (3, "c1", 0)
    ]  # fmt: skip
    (fourth,) = lineage.find("4")
    assert fourth.samples == third.samples, "a step that was skipped trained nothing"


def test_what_trained_on_an_erased_user_is_known_by_step(lineage):
    assert lineage.trained_of_erased() == {1: {"a1"}, 3: {"a1"}}
    assert lineage.is_erased("acme", "u-a") and not lineage.is_erased("other", "u-a")
    lineage.add(UserErased(tenant="acme", user="u-guest", key_id="k", step_last=1))
    lineage.add(UserErased(tenant="other", user="u-a", key_id="k", step_last=2))
    assert lineage.trained_of_erased() == {1: {"a1"}, 3: {"a1"}}, "c1 came after the erasure"


def test_a_user_a_request_and_feedback_are_in_every_version_from_one_on(lineage):
    users = lineage.find("u-a")
    assert [(each.first_version, each.requests, each.is_erased) for each in users] == [
        (1, ["a1"], True), (3, ["c1"], False)
    ]  # fmt: skip
    (mine,) = lineage.find("u-a", "other")
    assert [sample.sample_id for sample in mine.samples] == ["c1"]
    (guest,) = lineage.find("u-guest")
    assert guest.first_version == 1, "a request in another user's session"
    (request,) = lineage.find("a2")
    assert (request.kind, request.first_version, len(request.samples)) == ("request", 1, 2)
    assert [each.first_version for each in lineage.find("f1")] == [1, 3]
    assert [each.name for each in lineage.find("acme.f1")] == ["acme.f1"]
    for name in ("u-b", "b1", "n1", "d1"):
        assert [each.first_version for each in lineage.find(name)] == [None], name


def test_what_the_log_does_not_have_is_said(lineage):
    for name in ("5", "u-x", "", "f2"):
        with pytest.raises(NotFoundError, match="no such version, user, request or feedback"):
            lineage.find(name)
    with pytest.raises(NotFoundError, match="of tenant nobody"):
        lineage.find("a1", "nobody")
