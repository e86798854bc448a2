"""Describes events in words, for the log tail on the page."""

from collections.abc import Callable
from typing import Any

from penstock.actors.monitor.state import LogLine
from penstock.messages.base import Event
from penstock.messages.control import (
    ActorFailed,
    ActorStarted,
    ItemCharged,
    ItemQuarantined,
    MessageRejected,
    RunFinished,
    RunStarted,
)
from penstock.messages.feedback import FeedbackReceived, FeedbackRetracted, LiveSampleJoined
from penstock.messages.gates import CandidateChosen, ExperimentDecided, ExperimentStarted
from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalCompleted, EvalRequested
from penstock.messages.signals.preferences import PreferencesTrained
from penstock.messages.signals.quarantine import FeedbackQuarantined
from penstock.messages.task import GroupGranted
from penstock.messages.training import CheckpointSaved, MidtrainCompleted, StepCompleted
from penstock.messages.weights import WeightsApplied, WeightsPublished

TEXT_CHARS_MAX = 240
"""Longest line; errors may carry whole tracebacks."""
_STEP_METRICS = (
    ("reward", "reward_mean"),
    ("pass rate", "pass_rate"),
    ("staleness", "staleness_max"),
    ("k3", "mismatch_k3"),
    ("entropy", "entropy"),
    ("KL", "kl_reference"),
)


def describe(event: Event, at: float) -> LogLine | None:
    """Return the line for an event, or None if the event has none."""
    if isinstance(event, WeightsApplied) and not event.digest_matches:
        text = f"{event.replica}: version {event.policy_version} has a wrong digest"
        return LogLine(at=at, level="error", text=text)
    if isinstance(event, StepCompleted) and event.skipped:
        text = f"step {event.step} skipped, version {event.policy_version} has unchanged weights"
        return LogLine(at=at, level="error", text=f"{text}: {event.skipped}"[:TEXT_CHARS_MAX])
    if isinstance(event, RunFinished) and event.is_failure:
        text = f"run failed at step {event.step}: {event.reason}"
        return LogLine(at=at, level="error", text=text[:TEXT_CHARS_MAX])
    # Only the first group that takes the last fresh task: later ones are attempts at old tasks.
    if isinstance(event, GroupGranted) and event.num_fresh + event.attempt == 0:
        text = (
            f"group {event.group_index} has the last training task that no group had attempted; "
            "later groups repeat tasks, preferring those with the most uncertain solve rate"
        )
        return LogLine(at=at, level="warn", text=text)
    entry = _DESCRIPTIONS.get(type(event))
    if entry is None:
        return None
    level, words = entry
    return LogLine(at=at, level=level, text=words(event)[:TEXT_CHARS_MAX])


def _step(event: StepCompleted) -> str:
    values = {name: event.metrics[key] for name, key in _STEP_METRICS if key in event.metrics}
    parts = [f"{name} {value:.3g}" for name, value in values.items()]
    times = f"train {event.train_s:.1f} s, wait {event.wait_s:.1f} s"
    return f"step {event.step}: {', '.join([*parts, times])}"


def _evaluated(event: EvalCompleted) -> str:
    rate = event.num_solved / max(1, event.num_tasks)
    shares = [f"{name} {share:.2f}" for name, share in event.pass_rate_by_category.items()]
    if event.num_wrong_version:
        shares.append(f"{event.num_wrong_version} from a wrong version left out")
    shares += [f"pass@{k} {value:.2f}" for k, value in event.pass_at_k.items() if k > 1]
    counts = ", ".join([f"{event.num_solved} of {event.num_tasks}", *shares])
    if found := event.comparison:
        gain = found.difference
        counts += (
            f"; against version {found.policy_version} {gain.value:+.2f}"
            f" [{gain.low:+.2f}, {gain.high:+.2f}], p {found.p_value:.2g}"
        )
    tasks = f"the held-out tasks of {event.eval_set}" if event.eval_set else "held-out tasks"
    return f"version {event.policy_version} solves {rate:.1%} of {tasks} ({counts})"


def _published(event: WeightsPublished) -> str:
    num_bytes = sum(shard.num_bytes for shard in event.shards)
    return f"version {event.policy_version} published: {event.kind}, {num_bytes / 1e3:,.2f} kB"


def _midtrained(event: MidtrainCompleted) -> str:
    done = "from the cache" if event.is_cached else "done"
    return (
        f"mid-training {done}: {event.num_tokens:,} tokens, loss {event.loss_first:.3f} to "
        f"{event.loss_last:.3f}, held-out {event.heldout_loss:.3f}"
    )


def _preferred(event: PreferencesTrained) -> str:
    before, after = event.heldout_before.get("loss", 0.0), event.heldout_after.get("loss", 0.0)
    return (
        f"trained on preferences: {event.num_pairs} pairs, {event.num_labels} labels, loss "
        f"{event.loss_first:.3f} to {event.loss_last:.3f}, held-out {before:.3f} to {after:.3f}"
    )


def _quarantined(event: FeedbackQuarantined) -> str:
    text = f"feedback of {event.tenant}, {event.user} quarantined: {event.num_signals} signals"
    return f"{text} in a window, at most {event.usual:.0f} before; {event.key()}"


def _charged(event: ItemCharged) -> str:
    how = "charged with" if event.is_proven else "suspected of"
    return f"{event.item} {how} a failure{_of(event)}: {event.cause}"


def _of(event: ItemCharged | ItemQuarantined) -> str:
    return f" (task {event.task_id})" if event.task_id else ""


def _decided(event: ExperimentDecided) -> str:
    return f"version {event.policy_version} is {event.decision.replace('_', ' ')}: {event.reason}"


_DESCRIPTIONS: dict[type[Event], tuple[str, Callable[[Any], str]]] = {
    RunStarted: ("info", lambda e: f"run {e.run_id} started, seed {e.seed}"),
    RunFinished: ("info", lambda e: f"run finished at step {e.step}: {e.reason}"),
    ActorStarted: ("info", lambda e: f"{e.actor} started (pid {e.pid})"),
    ActorFailed: ("error", lambda e: f"{e.actor} failed: {e.error}"),
    MessageRejected: ("error", lambda e: f"{e.actor} rejected a message: {e.cause}"),
    ItemCharged: ("warn", _charged),
    ItemQuarantined: ("error", lambda e: f"{e.item} is quarantined{_of(e)}: {e.cause}"),
    MidtrainCompleted: ("info", _midtrained),
    PreferencesTrained: ("info", _preferred),
    StepCompleted: ("info", _step),
    CheckpointSaved: ("info", lambda e: f"checkpoint of step {e.step} saved"),
    WeightsPublished: ("info", _published),
    EvalRequested: ("info", lambda e: f"evaluation {e.eval_id} started"),
    EvalCompleted: ("info", _evaluated),
    ChannelMoved: ("info", lambda e: f"channel {e.channel} points to version {e.policy_version}"),
    FeedbackQuarantined: ("warn", _quarantined),
    CandidateChosen: ("info", lambda e: f"version {e.policy_version} is the candidate"),
    ExperimentStarted: ("info", lambda e: f"experiment started: version {e.policy_version}"),
    ExperimentDecided: ("info", _decided),
    FeedbackReceived: ("info", lambda e: f"feedback {e.name} = {e.value:g} on {e.request_id}"),
    FeedbackRetracted: ("warn", lambda e: f"feedback {e.feedback_id} retracted"),
    LiveSampleJoined: ("info", lambda e: f"{e.sample_id} joined with reward {e.reward:.2f}"),
}

DESCRIBED_EVENTS = tuple(_DESCRIPTIONS)
"""Types of the events that always have a line."""
