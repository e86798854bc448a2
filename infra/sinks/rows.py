"""The metrics of a run, as rows: one per event that holds some, with the log's own values."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.messages.base import Event
from penstock.messages.bus import Delivery
from penstock.messages.reward import EvalCompleted
from penstock.messages.training import MidtrainCompleted, StepCompleted
from penstock.messages.weights import WeightsApplied, WeightsPublished, WeightsRelayed


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The metrics of one event."""

    step: int
    """Policy version that they are of, which is the number of the step that made it."""
    at: float
    """When the event was stored, unix seconds."""
    values: dict[str, float]
    """By name, e.g. `step/loss`, `eval/pass_rate`."""


def row_of(delivery: Delivery) -> Row | None:
    """Return an event's metrics; None for an event that has none."""
    measure = _MEASURES.get(type(delivery.event))
    if measure is None:
        return None
    step, values = measure(delivery.event)
    return Row(step=step, at=delivery.stored_at, values=values)


def _prefixed(prefix: str, values: Mapping[Any, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": float(value) for name, value in values.items()}


def _fields(prefix: str, event: Event, *names: str) -> dict[str, float]:
    return _prefixed(prefix, {name: getattr(event, name) for name in names})


def _step(event: StepCompleted) -> tuple[int, dict[str, float]]:
    values = _prefixed("step", event.metrics)
    values |= _fields("step", event, "train_s", "wait_s", "num_skipped")
    return event.step, values | _prefixed("staleness_tokens", event.staleness_tokens)


def _midtrain(event: MidtrainCompleted) -> tuple[int, dict[str, float]]:
    names = ("num_tokens", "loss_first", "loss_last", "heldout_loss", "heldout_perplexity")
    return 0, _fields("midtrain", event, *names, "wall_s", "num_saves", "num_resumed")


def _eval(event: EvalCompleted) -> tuple[int, dict[str, float]]:
    prefix = f"eval/{event.eval_set}" if event.eval_set else "eval"
    names = ("num_solved", "num_tasks", "num_masked", "num_wrong_version")
    values = _fields(prefix, event, *names)
    values[f"{prefix}/pass_rate"] = event.num_solved / max(1, event.num_tasks)
    values |= _prefixed(f"{prefix}/category", event.pass_rate_by_category)
    values |= _prefixed(f"{prefix}/source", event.pass_rate_by_source)
    for name, bound in (("low", 0), ("high", 1)):
        bounds = {k: interval[bound] for k, interval in event.intervals.items()}
        values |= _prefixed(f"{prefix}/pass_at_{name}", bounds)
    return event.policy_version, values | _prefixed(f"{prefix}/pass_at", event.pass_at_k)


def _published(event: WeightsPublished) -> tuple[int, dict[str, float]]:
    values = _fields("weights", event, "num_params", "num_changed", "full_bytes")
    values["weights/published_bytes"] = float(sum(shard.num_bytes for shard in event.shards))
    return event.policy_version, values


def _relayed(event: WeightsRelayed) -> tuple[int, dict[str, float]]:
    values = _fields(f"weights/{event.region}", event, "num_bytes", "fetch_ms")
    return event.policy_version, values


def _applied(event: WeightsApplied) -> tuple[int, dict[str, float]]:
    prefix = f"weights/{event.region}/{event.replica}"
    names = ("num_bytes", "stage_ms", "pause_ms", "digest_matches")
    return event.policy_version, _fields(prefix, event, *names)


_MEASURES: dict[type[Event], Callable[[Any], tuple[int, dict[str, float]]]] = {
    StepCompleted: _step,
    MidtrainCompleted: _midtrain,
    EvalCompleted: _eval,
    WeightsPublished: _published,
    WeightsRelayed: _relayed,
    WeightsApplied: _applied,
}
ROW_TYPES: tuple[type[Event], ...] = tuple(_MEASURES)
"""Events that hold metrics."""
