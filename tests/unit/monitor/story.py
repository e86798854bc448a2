"""The events of a small run, and how to interleave their streams."""

from collections import defaultdict

from tests.sealed import sealed_turn

from penstock.messages.base import FORMAT, Array, Event, Stream
from penstock.messages.control import ActorFailed, ActorStarted, RunFinished, RunStarted
from penstock.messages.feedback import (
    FeedbackReceived,
    FeedbackRetracted,
    InferenceRecorded,
    LiveSampleJoined,
)
from penstock.messages.reward import EvalCompleted, Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    SandboxRecord,
    StopReason,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import CreditsChanged, Purpose
from penstock.messages.telemetry import ActorReported, MidtrainProgressed, Wait
from penstock.messages.training import (
    BatchManifest,
    GroupEntry,
    MidtrainCompleted,
    SampleEntry,
    StepCompleted,
)
from penstock.messages.weights import (
    ShardRef,
    SnapshotKind,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

EMPTY = Array(dtype="int32", shape=(0,), data=b"")
MACHINE = SandboxRecord(
    backend="uml", isolation_class="vm", kernel_digest="k", image_digest="i", boot_ms=90.0
)
AT = 1000.0


def spans(policy_version: int, num_tokens: int) -> list[VersionSpan]:
    return [VersionSpan(policy_version=policy_version, num_tokens=num_tokens)]


def turn(policy_version: int, num_tokens: int) -> Turn:
    return Turn(
        context_ids=EMPTY,
        token_ids=Array(dtype="int32", shape=(num_tokens,), data=b"\0" * 4 * num_tokens),
        behavior_logprobs=EMPTY,
        version_spans=spans(policy_version, num_tokens),
        stop_reason=StopReason.STOP,
    )


def rollout(name: str, policy_version: int, outcome: Outcome) -> list[Event]:
    common = {"rollout_id": name, "group_id": "g0", "purpose": Purpose.TRAIN}
    turns = [turn(policy_version, 10), turn(policy_version, 5)]
    return [
        *(TurnSampled(**common, turn_index=i, turn=t) for i, t in enumerate(turns)),
        RolloutFinished(
            **common,
            group_index=0,
            group_size=2,
            member=0,
            task_id="t",
            category="operator",
            end=EpisodeEnd.FINISHED,
            turns=[one.summary for one in turns],
            files=EpisodeFiles(),
            sandbox=MACHINE,
            num_calls=2,
            num_invalid_calls=1,
        ),
        Verdict(
            **common,
            group_index=0,
            judge="hidden_tests",
            judge_version="1",
            outcome=outcome,
            reward=1.0,
            sandbox=MACHINE,
        ),
    ]


def version(policy_version: int, num_bytes: int, *, matches: bool = True) -> list[Event]:
    kind = SnapshotKind.DELTA if policy_version else SnapshotKind.FULL
    shard = ShardRef(shard_id=0, object_key="o", num_bytes=num_bytes, blake3="b", codec="gap")
    published = WeightsPublished(
        policy_version=policy_version,
        base_version=policy_version - 1,
        kind=kind,
        optimizer_step=policy_version,
        fencing_token=1,
        representation="bf16",
        base_root_digest="",
        target_root_digest="d",
        num_params=100,
        num_changed=25,
        full_bytes=1000,
        shards=[shard],
    )
    relayed = WeightsRelayed(
        region="west", policy_version=policy_version, num_bytes=num_bytes, fetch_ms=3.0
    )
    applied = [
        WeightsApplied(
            region="west",
            replica=replica,
            policy_version=policy_version,
            root_digest="d",
            digest_matches=matches,
            from_version=policy_version - 1,
            num_bytes=num_bytes,
            stage_ms=20.0,
            pause_ms=pause_ms,
        )
        for replica, pause_ms in (("west-0", 2.0), ("west-1", 4.0))
    ]
    return [published, relayed, *applied]


def sample(name: str, policy_version: int, outcome: Outcome, num_tokens: int = 15) -> SampleEntry:
    return SampleEntry(
        rollout_id=name,
        outcome=outcome,
        reward=1.0,
        advantage=0.5,
        version_spans=spans(policy_version, num_tokens),
    )


def step(number: int, *samples: SampleEntry, live: list[SampleEntry]) -> list[Event]:
    group = GroupEntry(group_id="g0", group_index=0, task_id="t", samples=list(samples))
    return [
        BatchManifest(step=number, policy_version=number - 1, groups=[group], live=live),
        StepCompleted(
            step=number,
            policy_version=number,
            weights_digest="d",
            optimizer_digest="o",
            metrics={"reward_mean": 0.5, "ess": float("nan"), "mismatch_k1": 0.001},
            staleness_tokens={0: 15, 1: 15},
            train_s=2.0,
            wait_s=3.0,
        ),
    ]


def live_request() -> list[Event]:
    common = {"variant": "current", "propensity": 1.0, "policy_version": 0}
    given = {"request_id": "q1", "key_id": "user", "name": "accept", "value": 1.0}
    return [
        InferenceRecorded(
            **common,
            request_id="q1",
            session_id="s",
            key_id="user",
            training_consent=True,
            turn=sealed_turn(turn(0, 8), "q1"),
            replica="west-0",
        ),
        FeedbackReceived(feedback_id="f1", **given),
        FeedbackReceived(feedback_id="f1.1", amends="f1", **given),
        FeedbackReceived(feedback_id="f2", **given),
        FeedbackRetracted(feedback_id="f2", request_id="q1"),
        LiveSampleJoined(
            **common,
            sample_id="q1",
            request_ids=["q1"],
            turns=[turn(0, 8).summary],
            feedback_ids=["f1"],
            reward=0.75,
        ),
    ]


def story() -> list[Event]:
    """Two steps, one of them with a live sample; one rollout is still in flight."""
    return [
        RunStarted(
            run_id="r1", seed=3, config_toml="", versions={}, format=FORMAT, cached=("corpora",)
        ),
        ActorStarted(actor="trainer", incarnation="1", pid=11),
        MidtrainProgressed(num_tokens=50, num_tokens_total=100, loss=3.0, tokens_per_s=10.0),
        MidtrainProgressed(num_tokens=100, num_tokens_total=100, loss=2.0, heldout_loss=2.5),
        MidtrainCompleted(
            num_tokens=100,
            loss_first=6.0,
            loss_last=2.0,
            heldout_loss=2.5,
            heldout_perplexity=12.0,
            weights_digest="d",
            wall_s=9.0,
        ),
        *version(0, 1000),
        EvalCompleted(eval_id="e0", policy_version=0, num_solved=1, num_tasks=4),
        *rollout("a", 0, Outcome.SOLVED),
        *rollout("b", 0, Outcome.FAILED),
        *rollout("c", 1, Outcome.FAILED),
        *live_request(),
        CreditsChanged(
            policy_version=1,
            num_groups_granted=3,
            num_groups_trained=2,
            num_groups_discarded=0,
            num_groups_allowed=4,
            staleness_max=2,
        ),
        *step(1, sample("a", 0, Outcome.SOLVED), live=[]),
        *version(1, 100),
        *step(
            2,
            sample("b", 0, Outcome.STALE),
            live=[sample("q1", 0, Outcome.SOLVED, 8), sample("q0", 0, Outcome.CANCELLED, 0)],
        ),
        *version(2, 50, matches=False),
        EvalCompleted(eval_id="e2", policy_version=2, num_solved=3, num_tasks=4),
        ActorFailed(actor="trainer", incarnation="1", error="KeyError: 'x'", num_restarts=1),
        ActorStarted(actor="trainer", incarnation="2", pid=12),
    ]


def report(actor: str, role: str, at: float, busy_s: float, *waits: Wait) -> ActorReported:
    return ActorReported(
        actor=actor,
        role=role,
        at=at,
        busy_s=busy_s,
        uptime_s=10.0,
        num_handled=5,
        num_queued=2,
        gauges={"vms_warm": 3.0},
        waits=list(waits),
    )


def finished() -> RunFinished:
    return RunFinished(reason="step limit", step=2)


def by_stream(events: list[Event]) -> dict[Stream, list[Event]]:
    streams: defaultdict[Stream, list[Event]] = defaultdict(list)
    for event in events:
        streams[event.stream].append(event)
    return streams
