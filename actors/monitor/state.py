"""The view model of a run: plain structs that encode to JSON, one top-level field per section.

`penstock status`, `summary.json`, the live page, `report.html` and `/metrics` all render it.

Weights in each region, as their relays and receivers report them: a section of the page.
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
    """The transfer of one policy version to one region; times are of the slowest replica."""

    policy_version: int
    kind: str = ""
    num_bytes: int = 0
    full_bytes: int = 0
    changed_fraction: float = 0.0
    fetch_ms: float = 0.0
    stage_ms: float = 0.0
    pause_ms: float = 0.0
    lag_s: float = 0.0
    """From its publication until the replica served it or a newer one."""

    @property
    def ratio(self) -> float:
        """How many times smaller than the full snapshot; 0 if unknown."""
        return self.full_bytes / self.num_bytes if self.num_bytes else 0.0


class RegionView(msgspec.Struct, kw_only=True):
    """Weights in one region."""

    replicas: dict[str, int] = {}
    """Replica -> the version that it serves, or served last."""
    lost: list[str] = []
    """Replicas that left or no longer report; the region's lag does not count them."""
    deltas: list[DeltaPoint] = []
    lag_versions: int = 0
    """Versions between the newest published one and the one that the slowest replica serves."""
    lag_s: float = 0.0
    """Age of the first version that this replica lacks; 0 at the head."""
    queue_s: float = 0.0
    """Mean queue time of its generators."""
    num_bytes: int = 0
    """Fetched by the region's relay, all versions together."""
    num_full_after_v0: int = 0
    num_digest_mismatches: int = 0


class RunView(msgspec.Struct, kw_only=True):
    """The run and its progress."""

    run_id: str = ""
    seed: int = 0
    phase: str = "starting"
    """starting, midtrain, rl, finished; serving: by `penstock serve`, whatever came before."""
    started_at: float = 0.0
    """Unix seconds; 0 before the run began."""
    rl_started_at: float = 0.0
    """End of mid-training; 0 before it."""
    finished_at: float = 0.0
    """0 until it is finished."""
    now: float = 0.0
    """Unix seconds of this state."""
    step: int = 0
    finish_reason: str = ""
    is_given_up: bool = False
    """Whether it finished because it cannot go on."""
    versions: dict[str, str] = {}
    cached: list[str] = []
    """What it took from the user's cache, in words."""
    num_rejected: int = 0
    """Messages in the dead-letter stream."""


class MidtrainPoint(msgspec.Struct, kw_only=True):
    """Losses after some tokens, in nats per token."""

    num_tokens: int
    loss: float
    heldout_loss: float = 0.0
    """0 if not measured."""


class MidtrainView(msgspec.Struct, kw_only=True):
    """Mid-training."""

    num_tokens: int = 0
    num_tokens_total: int = 0
    tokens_per_s: float = 0.0
    points: list[MidtrainPoint] = []
    loss_first: float = 0.0
    loss_last: float = 0.0
    heldout_loss: float = 0.0
    heldout_perplexity: float = 0.0
    wall_s: float = 0.0
    """0 until it is complete."""
    num_saves: int = 0
    num_resumed: int = 0
    """Times that it went on from a save."""


class StepPoint(msgspec.Struct, kw_only=True):
    """One optimizer step."""

    step: int
    at: float
    train_s: float
    wait_s: float
    metrics: dict[str, float]
    """reward_mean, pass_rate, loss, grad_norm, ess, mismatch_k1, mismatch_k3 ..."""


class TrainingView(msgspec.Struct, kw_only=True):
    """All optimizer steps together."""

    train_s: float = 0.0
    step_s_p50: float | None = None
    """Waiting and training."""
    wait_s_p95: float | None = None
    """Of a step, for its batch."""
    num_skipped: int = 0
    """Steps that changed no weight: their loss or gradient was no finite number."""
    tokens_read: float = 0.0
    route_bytes: float = 0.0
    """Recorded routes that the trained rollouts brought along."""
    route_bytes_p50: float | None = None
    """Per step."""


class StalenessView(msgspec.Struct, kw_only=True):
    """Staleness of the trained tokens, and the budget."""

    tokens: dict[int, int] = {}
    """Staleness in versions -> number of trained tokens."""
    seen_max: int = 0
    budget_max: int = -1
    """`staleness_max`; -1 until the pacer has reported it."""
    num_groups_granted: int = 0
    num_groups_trained: int = 0
    num_groups_discarded: int = 0
    num_groups_allowed: int = 0
    policy_version: int = -1
    """The oldest version that the replicas of training serve."""


class PublishedView(msgspec.Struct, kw_only=True):
    """All published versions together."""

    num_versions: int = 0
    num_empty_deltas: int = 0
    """Deltas in which no weight changed."""
    num_full_after_v0: int = 0
    ratio_p50: float | None = None
    """Size of the full snapshot over the size of the delta; empty deltas are left out."""
    pause_ms_p50: float | None = None
    """Swap pauses of all replicas, after version 0."""
    pause_ms_max: float | None = None


class RolloutsView(msgspec.Struct, kw_only=True):
    """Episodes of training and evaluation."""

    num_finished: int = 0
    num_turns: int = 0
    """Sampled turns; those that a branch shares with its trunk count once."""
    num_sampled_tokens: int = 0
    """Tokens of these turns."""
    num_train: int = 0
    """Training rollouts."""
    num_train_turns: int = 0
    """Turns of training rollouts; each branch counts its trunk's."""
    num_train_segments: int = 0
    """Contexts of training rollouts, one after the other; 1 of each that has no summary."""
    num_summaries: int = 0
    num_summary_tokens: int = 0
    num_calls: int = 0
    num_invalid_calls: int = 0
    ends: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    """Verdicts on training rollouts."""


class SandboxView(msgspec.Struct, kw_only=True):
    """Machines."""

    backend: str = ""
    """Several are joined by `+`, likewise below."""
    isolation_class: str = ""
    num_vms: int = 0
    """Machines that ran an episode or a test."""
    boot_ms_p50: float = 0.0
    gauges: dict[str, float] = {}
    """Newest reports of the pools, summed over hosts."""


class LedgerView(msgspec.Struct, kw_only=True):
    """The conservation ledger."""

    totals: LedgerRow = LedgerRow()
    rows: dict[int, LedgerRow] = {}
    """Rows of the newest policy versions."""
    balanced: bool = True
    violations: list[str] = []
    num_violations: int = 0
    preferences: dict[str, int] = {}
    """Users' corrections and judgments by fate; empty where there is none."""


class LiveView(msgspec.Struct, kw_only=True):
    """Users' requests and their outcomes."""

    num_requests: int = 0
    num_consented: int = 0
    num_counted: int = 0
    """Requests that may not be stored: of these the log has counts alone."""
    num_external: int = 0
    """Sessions that were sampled elsewhere and submitted; not among the requests."""
    num_feedback: int = 0
    num_retracted: int = 0
    num_joined: int = 0
    num_trained: int = 0
    reward_mean: float = 0.0
    """Mean over the joined samples."""


class ActorView(msgspec.Struct, kw_only=True):
    """One actor."""

    role: str = ""
    pid: int = 0
    at: float = 0.0
    """Unix seconds of its last report."""
    is_reporting: bool = True
    has_ended: bool = False
    """Whether it was the run's alone: the service on the run works without it."""
    uptime_s: float = 0.0
    busy_fraction: float = 0.0
    """Share of the time since it started."""
    busy_fraction_recent: float = 0.0
    """Share of the time between its last two reports."""
    num_handled: int = 0
    num_queued: int = 0
    num_starts: int = 0
    last_error: str = ""
    gauges: dict[str, float] = {}
    totals: dict[str, float] = {}
    """Gauges that count up from each start of the actor, summed over its starts."""
    waits: list[Wait] = []


class LogLine(msgspec.Struct, kw_only=True):
    """One line of the log tail."""

    at: float
    level: str
    """info, warn, error."""
    text: str


class MonitorState(msgspec.Struct, kw_only=True):
    """The whole view; each field is a section of the page."""

    run: RunView = msgspec.field(default_factory=RunView)
    midtrain: MidtrainView = msgspec.field(default_factory=MidtrainView)
    steps: list[StepPoint] = []
    training: TrainingView = msgspec.field(default_factory=TrainingView)
    evals: list[EvalPoint] = []
    """Of the main set."""
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
    log: list[LogLine] = []


def encode_state(state: MonitorState) -> bytes:
    """Return the state as JSON."""
    return msgspec.json.encode(state)


def decode_state(data: bytes) -> MonitorState:
    """Read what `encode_state` wrote.

    Raises:
        CodecError: The bytes are not a state.

    """
    return parse_json(data, MonitorState, "the state of a run")
