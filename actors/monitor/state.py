"""The view model of a run: plain structs that encode to JSON, one top-level field per section.

`penstock status`, `summary.json`, the live page, `report.html` and `/metrics` all render it.
"""

import msgspec

from penstock.actors.monitor.behavior_views import BehaviorView
from penstock.actors.monitor.charge_views import ChargesView
from penstock.actors.monitor.compute_views import ComputeView
from penstock.actors.monitor.gate_views import GatesView
from penstock.actors.monitor.judge_views import JudgeView
from penstock.actors.monitor.stall_views import StallView
from penstock.actors.monitor.task_views import EvalPoint, TasksView
from penstock.messages.reading.parsing import parse_json
from penstock.messages.telemetry import Wait
from penstock.messages.training import LedgerRow


class DeltaPoint(msgspec.Struct, kw_only=True):
    """The transfer of one policy version to one region; times are those of the slowest replica."""

    policy_version: int
    kind: str = ""
    num_bytes: int = 0
    full_bytes: int = 0
    changed_fraction: float = 0.0
    fetch_ms: float = 0.0
    stage_ms: float = 0.0
    pause_ms: float = 0.0
    lag_s: float = 0.0
    """Seconds from the version's publication until the replica served it or a newer one."""

    @property
    def ratio(self) -> float:
        """Size of the full snapshot over the size of the transfer; 0 if unknown."""
        return self.full_bytes / self.num_bytes if self.num_bytes else 0.0


class RegionView(msgspec.Struct, kw_only=True):
    """Policy versions in one region, as its relay and receivers report them."""

    replicas: dict[str, int] = {}
    """Replica -> version that it serves or served last."""
    lost: list[str] = []
    """Replicas that left or no longer report; the region's lag does not count them."""
    deltas: list[DeltaPoint] = []
    lag_versions: int = 0
    """Number of versions by which the slowest replica is behind the newest published one."""
    lag_s: float = 0.0
    """Age in seconds of the first version that the slowest replica lacks; 0 if it lacks none."""
    queue_s: float = 0.0
    """Mean queue time of the region's generators, in seconds."""
    num_bytes: int = 0
    """Bytes fetched by the region's relay, over all versions."""
    num_full_after_v0: int = 0
    num_digest_mismatches: int = 0


class StreamView(msgspec.Struct, kw_only=True):
    """How full a stream of the log is."""

    fill_ratio: float
    """Share of the bytes at which it refuses events."""
    num_events: int
    archived_to: int
    """Last sequence in the archive; 0 for none."""


class RunView(msgspec.Struct, kw_only=True):
    """The run and its progress."""

    run_id: str = ""
    seed: int = 0
    phase: str = "starting"
    """Phase of the run: starting, midtrain, rl or finished; serving: under `penstock serve`."""
    started_at: float = 0.0
    """Start of the run, Unix seconds; 0 before it."""
    rl_started_at: float = 0.0
    """End of mid-training, Unix seconds; 0 before it."""
    finished_at: float = 0.0
    """End of the run, Unix seconds; 0 before it."""
    now: float = 0.0
    """Time of this state, Unix seconds."""
    step: int = 0
    finish_reason: str = ""
    is_given_up: bool = False
    """Whether the run ended because of a failure that it cannot recover from."""
    versions: dict[str, str] = {}
    cached: list[str] = []
    """Names of the results that came from the user's cache."""
    num_rejected: int = 0
    """Number of messages in the dead-letter stream."""


class MidtrainPoint(msgspec.Struct, kw_only=True):
    """Losses in nats per token after a number of tokens of mid-training."""

    num_tokens: int
    loss: float
    heldout_loss: float = 0.0
    """Loss on held-out text; 0 if it was not measured."""


class MidtrainView(msgspec.Struct, kw_only=True):
    """Progress and losses of mid-training."""

    num_tokens: int = 0
    num_tokens_total: int = 0
    tokens_per_s: float = 0.0
    points: list[MidtrainPoint] = []
    loss_first: float = 0.0
    loss_last: float = 0.0
    heldout_loss: float = 0.0
    heldout_perplexity: float = 0.0
    wall_s: float = 0.0
    """Duration in seconds; 0 until mid-training is complete."""
    num_saves: int = 0
    num_resumed: int = 0
    """Number of times that mid-training resumed from a save."""


class StepPoint(msgspec.Struct, kw_only=True):
    """One optimizer step."""

    step: int
    at: float
    train_s: float
    wait_s: float
    metrics: dict[str, float]
    """Metrics by name: reward_mean, pass_rate, loss, grad_norm, ess, mismatch_k1 ..."""


class TrainingView(msgspec.Struct, kw_only=True):
    """Totals and medians over all optimizer steps."""

    train_s: float = 0.0
    step_s_p50: float | None = None
    """Median duration of a step in seconds, including the wait for its batch."""
    wait_s_p95: float | None = None
    """95th percentile of a step's wait for its batch, in seconds."""
    num_skipped: int = 0
    """Number of steps skipped because their loss or gradient was not finite."""
    tokens_read: float = 0.0
    route_bytes: float = 0.0
    """Size of the recorded expert routes of the trained rollouts, in bytes."""
    route_bytes_p50: float | None = None
    """Median size of the recorded expert routes per step, in bytes."""


class StalenessView(msgspec.Struct, kw_only=True):
    """Staleness of the trained tokens, and the pacer's budget."""

    tokens: dict[int, int] = {}
    """Staleness in versions -> number of trained tokens."""
    seen_max: int = 0
    budget_max: int = -1
    """Largest staleness allowed (`staleness_max`); -1 until the pacer has reported it."""
    num_groups_granted: int = 0
    num_groups_trained: int = 0
    num_groups_discarded: int = 0
    num_groups_allowed: int = 0
    policy_version: int = -1
    """Oldest version that a training replica serves."""


class PublishedView(msgspec.Struct, kw_only=True):
    """Totals and medians over all published versions."""

    num_versions: int = 0
    num_empty_deltas: int = 0
    """Number of deltas in which no weight changed."""
    num_full_after_v0: int = 0
    """Number of full snapshots after version 0."""
    ratio_p50: float | None = None
    """Median of the full snapshot's size over the delta's size, without empty deltas."""
    pause_ms_p50: float | None = None
    """Median swap pause over all replicas, without version 0."""
    pause_ms_max: float | None = None
    """Longest swap pause over all replicas, without version 0."""


class RolloutsView(msgspec.Struct, kw_only=True):
    """Totals over training and evaluation rollouts."""

    num_finished: int = 0
    num_turns: int = 0
    """Number of sampled turns; those that a branch shares with its trunk count once."""
    num_sampled_tokens: int = 0
    """Number of tokens in the sampled turns."""
    num_train: int = 0
    """Number of training rollouts."""
    num_train_turns: int = 0
    """Number of turns in training rollouts; a branch includes the turns of its trunk."""
    num_train_segments: int = 0
    """Number of contexts in training rollouts; a rollout without summaries has one."""
    num_summaries: int = 0
    num_summary_tokens: int = 0
    num_calls: int = 0
    num_invalid_calls: int = 0
    ends: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    """Outcome -> number of verdicts on training rollouts."""


class SandboxView(msgspec.Struct, kw_only=True):
    """The run's sandbox machines."""

    backend: str = ""
    """Name of the backend; several are joined by `+`."""
    isolation_class: str = ""
    """Isolation class of the machines; several are joined by `+`."""
    num_vms: int = 0
    """Number of machines that ran an episode or a test."""
    boot_ms_p50: float = 0.0
    gauges: dict[str, float] = {}
    """Gauges of the pools, summed over hosts."""


class LedgerView(msgspec.Struct, kw_only=True):
    """The conservation ledger, which accounts for every sampled token."""

    totals: LedgerRow = LedgerRow()
    rows: dict[int, LedgerRow] = {}
    """Ledger rows of the newest policy versions."""
    balanced: bool = True
    violations: list[str] = []
    num_violations: int = 0
    preferences: dict[str, int] = {}
    """Number of users' corrections and labels by fate; empty without any."""


class LiveView(msgspec.Struct, kw_only=True):
    """Users' requests, feedback and joined samples."""

    num_requests: int = 0
    num_consented: int = 0
    num_counted: int = 0
    """Number of requests that may not be stored; the log has only their counts."""
    num_external: int = 0
    """Number of sessions sampled elsewhere and submitted; not included in the requests."""
    num_feedback: int = 0
    num_retracted: int = 0
    num_joined: int = 0
    num_trained: int = 0
    reward_mean: float = 0.0
    """Mean reward over the joined samples."""


class ActorView(msgspec.Struct, kw_only=True):
    """The newest report of one actor, and its starts and errors."""

    role: str = ""
    pid: int = 0
    at: float = 0.0
    """Time of the last report, Unix seconds."""
    is_reporting: bool = True
    has_ended: bool = False
    """Whether the actor belonged only to the training run, which `penstock serve` replaced."""
    uptime_s: float = 0.0
    busy_fraction: float = 0.0
    """Share of busy time since the actor's start."""
    busy_fraction_recent: float = 0.0
    """Share of busy time between the last two reports."""
    num_handled: int = 0
    num_queued: int = 0
    num_starts: int = 0
    last_error: str = ""
    gauges: dict[str, float] = {}
    totals: dict[str, float] = {}
    """Cumulative gauges, summed over all starts of the actor."""
    waits: list[Wait] = []


class LogLine(msgspec.Struct, kw_only=True):
    """One line of the log tail."""

    at: float
    level: str
    """Severity: info, warn or error."""
    text: str


class MonitorState(msgspec.Struct, kw_only=True):
    """The complete view model of a run; each field is a section of the page."""

    run: RunView = msgspec.field(default_factory=RunView)
    midtrain: MidtrainView = msgspec.field(default_factory=MidtrainView)
    steps: list[StepPoint] = []
    training: TrainingView = msgspec.field(default_factory=TrainingView)
    evals: list[EvalPoint] = []
    """Evaluations of the main set."""
    tasks: TasksView = msgspec.field(default_factory=TasksView)
    staleness: StalenessView = msgspec.field(default_factory=StalenessView)
    published: PublishedView = msgspec.field(default_factory=PublishedView)
    regions: dict[str, RegionView] = {}
    rollouts: RolloutsView = msgspec.field(default_factory=RolloutsView)
    behavior: BehaviorView = msgspec.field(default_factory=BehaviorView)
    compute: ComputeView = msgspec.field(default_factory=ComputeView)
    sandbox: SandboxView = msgspec.field(default_factory=SandboxView)
    ledger: LedgerView = msgspec.field(default_factory=LedgerView)
    charges: ChargesView = msgspec.field(default_factory=ChargesView)
    live: LiveView = msgspec.field(default_factory=LiveView)
    gates: GatesView = msgspec.field(default_factory=GatesView)
    judges: dict[str, JudgeView] = {}
    actors: dict[str, ActorView] = {}
    stall: StallView = msgspec.field(default_factory=StallView)
    streams: dict[str, StreamView] = {}
    """Streams of the log that the launcher measured; one that holds next to nothing is not here."""
    log: list[LogLine] = []


def encode_state(state: MonitorState) -> bytes:
    """Return the state as JSON."""
    return msgspec.json.encode(state)


def decode_state(data: bytes) -> MonitorState:
    """Return the state that `encode_state` encoded.

    Raises:
        CodecError: The bytes do not decode to a state.

    """
    return parse_json(data, MonitorState, "the state of a run")
