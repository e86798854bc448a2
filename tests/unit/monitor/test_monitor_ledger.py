"""The conservation ledger on hand-made logs."""

import itertools

import msgspec
import pytest

from penstock.messages.base import Array
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, TurnSampled, VersionSpan
from penstock.messages.task import Purpose
from penstock.messages.training import (
    BatchManifest,
    GroupEntry,
    LedgerRow,
    SampleEntry,
    StepCompleted,
)

EMPTY = Array(dtype="int32", shape=(0,), data=b"")


def spans(**tokens: int) -> list[VersionSpan]:
    """`v3=10` is ten tokens under version 3."""
    return [VersionSpan(policy_version=int(k[1:]), num_tokens=n) for k, n in tokens.items()]


def turn(**tokens: int) -> Turn:
    return Turn(
        context_ids=EMPTY,
        token_ids=EMPTY,
        behavior_logprobs=EMPTY,
        version_spans=spans(**tokens),
        stop_reason=StopReason.STOP,
    )


def sampled(rollout_id: str, index: int = 0, purpose=Purpose.TRAIN, **tokens: int) -> TurnSampled:
    return TurnSampled(
        rollout_id=rollout_id,
        group_id="g",
        purpose=purpose,
        turn_index=index,
        turn=turn(**tokens),
    )


def sample(rollout_id: str, outcome: Outcome, **tokens: int) -> SampleEntry:
    return SampleEntry(
        rollout_id=rollout_id,
        outcome=outcome,
        reward=0.0,
        advantage=0.0,
        version_spans=spans(**tokens),
    )


def manifest(step: int, *samples: SampleEntry, discarded=(), live=()) -> BatchManifest:
    def group(members):
        return GroupEntry(group_id="g", group_index=0, task_id="t", samples=list(members))

    return BatchManifest(
        step=step,
        policy_version=step - 1,
        groups=[group(samples)],
        discarded=[group(discarded)] if discarded else [],
        live=list(live),
    )


def test_every_token_is_in_one_column_of_its_version():
    ledger = Ledger()
    ledger.add_turn(sampled("a", 0, v0=10))
    ledger.add_turn(sampled("a", 1, v0=2, v1=5))
    ledger.add_turn(sampled("b", 0, v0=7))
    ledger.add_turn(sampled("c", 0, v1=3))
    ledger.add_turn(sampled("d", 0, v1=4))
    ledger.add_turn(sampled("e", 0, v1=6))
    ledger.add_turn(sampled("x", 0, Purpose.EVAL, v1=100))
    discarded = [sample("b", Outcome.STALE, v0=7), sample("c", Outcome.FILTERED, v1=3)]
    ledger.add_manifest(
        manifest(
            1,
            sample("a", Outcome.SOLVED, v0=12, v1=5),
            sample("d", Outcome.INFRASTRUCTURE_ERROR, v1=4),
            discarded=discarded,
        )
    )
    assert ledger.rows() == {
        0: LedgerRow(generated=19, trained=12, stale=7),
        1: LedgerRow(generated=18, trained=5, filtered=3, infra_failed=4, in_flight=6),
    }
    assert ledger.totals() == LedgerRow(
        generated=37, trained=17, stale=7, filtered=3, infra_failed=4, in_flight=6
    )
    assert ledger.balanced


def test_streams_may_come_in_any_order_and_twice():
    ledger = Ledger()
    settled = manifest(1, sample("a", Outcome.FAILED, v0=10))
    ledger.add_manifest(settled)
    assert not ledger.balanced
    for _ in range(2):
        ledger.add_turn(sampled("a", 0, v0=10))
        ledger.add_manifest(settled)
    assert ledger.balanced
    assert ledger.totals() == LedgerRow(generated=10, trained=10)


def test_live_samples_count_from_their_joining():
    ledger = Ledger()
    joined = LiveSampleJoined(
        sample_id="q",
        request_ids=["q"],
        feedback_ids=[],
        reward=1.0,
        variant="current",
        propensity=1.0,
        policy_version=0,
        turns=[turn(v0=8).summary],
    )
    ledger.add_live(joined)
    assert ledger.totals() == LedgerRow(generated=8, in_flight=8)
    ledger.add_manifest(manifest(1, live=[sample("q", Outcome.SOLVED, v0=8)]))
    assert ledger.totals() == LedgerRow(generated=8, trained=8)
    assert ledger.balanced


def revised(revision: int, outcome: Outcome) -> SampleEntry:
    return msgspec.structs.replace(sample("q", outcome, v0=8), revision=revision)


@pytest.mark.parametrize(
    ("outcomes", "column"),
    [
        ([Outcome.SOLVED, Outcome.FAILED], "trained"),
        ([Outcome.SOLVED, Outcome.FILTERED], "trained"),
        ([Outcome.CANCELLED, Outcome.SOLVED], "trained"),
        ([Outcome.STALE, Outcome.CANCELLED, Outcome.CANCELLED], "stale"),
        ([Outcome.CAPPED, Outcome.FAILED, Outcome.STALE], "trained"),
    ],
)
def test_a_sample_s_revisions_count_its_tokens_once(outcomes, column):
    ledger = Ledger()
    joined = LiveSampleJoined(
        sample_id="q",
        request_ids=["q"],
        feedback_ids=[],
        reward=1.0,
        variant="current",
        propensity=1.0,
        policy_version=0,
        turns=[turn(v0=8).summary],
    )
    for revision, outcome in enumerate(outcomes):
        ledger.add_live(msgspec.structs.replace(joined, revision=revision))
        ledger.add_manifest(manifest(revision + 1, live=[revised(revision, outcome)]))
        assert ledger.balanced
    assert ledger.totals() == LedgerRow(generated=8, **{column: 8})
    ledger.add_manifest(manifest(9, live=[revised(len(outcomes) - 1, Outcome.JUDGE_ERROR)]))
    assert not ledger.balanced, "no revision is settled twice"


def test_faults_are_named():
    ledger = Ledger()
    ledger.add_turn(sampled("a", v0=10))
    ledger.add_turn(sampled("b", v0=10))
    ledger.add_turn(sampled("c", v0=10))
    ledger.add_manifest(manifest(1, sample("a", Outcome.SOLVED, v0=9)))
    ledger.add_manifest(manifest(2, sample("b", Outcome.SOLVED, v0=10)))
    ledger.add_manifest(manifest(3, sample("b", Outcome.SOLVED, v0=10)))
    ledger.add_manifest(manifest(4, discarded=[sample("c", Outcome.FAILED, v0=10)]))
    ledger.add_manifest(manifest(5, sample("ghost", Outcome.FAILED, v0=1)))
    assert not ledger.balanced
    twice, discarded, short, ghost = ledger.violations
    assert twice == "b: settled in step 2 and in step 3"
    assert discarded.startswith("c: discarded in step 4")
    assert short.startswith("a: step 1 settles {0: 9}")
    assert ghost.startswith("ghost: step 5 settles {0: 1}")


@pytest.mark.parametrize("is_skipped", [False, True])
def test_of_a_trained_rollout_old_tokens_are_withheld_in_whatever_order(is_skipped):
    """Version 0's tokens are context; those of versions 1 and 2 are trained, or skipped."""
    entry = msgspec.structs.replace(sample("a", Outcome.SOLVED, v0=4, v1=3, v2=2), trained_from=1)
    whole = sample("b", Outcome.WITHHELD, v0=5)
    step = StepCompleted(
        step=1,
        policy_version=1,
        weights_digest="",
        optimizer_digest="",
        metrics={},
        skipped="nan" if is_skipped else "",
    )
    events = [
        lambda ledger: ledger.add_turn(sampled("a", 0, v0=4)),
        lambda ledger: ledger.add_turn(sampled("a", 1, v1=3, v2=2)),
        lambda ledger: ledger.add_turn(sampled("b", 0, v0=5)),
        lambda ledger: ledger.add_manifest(manifest(1, entry, whole)),
        lambda ledger: ledger.add_step(step),
    ]
    for order in itertools.permutations(events):
        ledger = Ledger()
        for add in order:
            add(ledger)
        column = "skipped" if is_skipped else "trained"
        assert ledger.totals() == LedgerRow(generated=14, withheld=9, **{column: 5})
        assert ledger.rows()[0] == LedgerRow(generated=9, withheld=9)
        assert ledger.balanced
