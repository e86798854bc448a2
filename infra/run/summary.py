"""The closing figures of a run, folded from its log: `runs/<id>/summary.json`."""

from collections import Counter, defaultdict
from math import ceil
from statistics import mean, median
from typing import Any

from penstock.actors.monitor.regions import Regions
from penstock.actors.monitor.state import RegionView
from penstock.infra.run.config import RunConfig
from penstock.messages.base import Event
from penstock.messages.bus import Bus, Delivery
from penstock.messages.control import RunFinished
from penstock.messages.feedback import FeedbackReceived, InferenceRecorded, LiveSampleJoined
from penstock.messages.ledger import Ledger
from penstock.messages.reward import EvalCompleted, Verdict
from penstock.messages.rollout import RolloutFinished, SandboxRecord, TurnSampled
from penstock.messages.task import Purpose
from penstock.messages.telemetry import ActorReported
from penstock.messages.training import BatchManifest, MidtrainCompleted, StepCompleted
from penstock.messages.weights import (
    SnapshotKind,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

TYPES: tuple[type[Event], ...] = (
    MidtrainCompleted, TurnSampled, RolloutFinished, Verdict, BatchManifest, StepCompleted,
    EvalCompleted, WeightsPublished, WeightsRelayed, WeightsApplied, InferenceRecorded,
    FeedbackReceived, LiveSampleJoined, RunFinished, ActorReported,
)  # fmt: skip

ENGINE_BUSY = "engine_busy_s"
MISMATCHES = "digest_mismatches"
"""Gauges of generators and receivers, counted from each start of theirs."""
_P95 = 0.95


class Summary:
    """Folds events into the figures; order within a stream is all it needs."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._ledger = Ledger()
        self._counts: Counter[str] = Counter()
        self._turns: list[int] = []
        self._machines: list[SandboxRecord] = []
        self._pass_rates: dict[int, float] = {}
        self._staleness_seen_max = 0
        self._ratios: list[float] = []
        self._versions: set[int] = set()
        self._pauses_ms: list[float] = []
        self._regions: dict[str, RegionView] = {}
        self._lags = Regions(self._regions)
        self._train_s = 0.0
        self._steps_s: list[float] = []
        self._route_bytes: list[float] = []
        self._tokens_read = 0.0
        self._midtrain: MidtrainCompleted | None = None
        self._rl_from = self._rl_to = 0.0
        self._steps = 0
        self._gauges: dict[tuple[str, str], float] = {}
        """(actor, gauge) -> newest value."""
        self._sums: defaultdict[tuple[str, str], float] = defaultdict(float)
        """The same, over all starts of the actor: a start begins at 0."""

    async def read(self, bus: Bus) -> None:
        """Fold the whole log as it stands."""
        async for delivery in bus.follow(TYPES, stop_at_end=True):
            self.add(delivery)

    def add(self, delivery: Delivery) -> None:
        """Fold one event."""
        event = delivery.event
        match event:
            case MidtrainCompleted():
                self._midtrain, self._rl_from = event, delivery.stored_at
            case RunFinished():
                self._rl_to = delivery.stored_at
            case TurnSampled():
                self._ledger.add_turn(event)
            case RolloutFinished() | Verdict():
                self._add_rollout(event)
            case LiveSampleJoined():
                self._ledger.add_live(event)
            case BatchManifest():
                self._ledger.add_manifest(event)
                self._counts["live_trained"] += sum(s.outcome.is_trained for s in event.live)
            case StepCompleted():
                self._add_step(event)
            case EvalCompleted():
                self._pass_rates[event.policy_version] = event.num_solved / max(event.num_tasks, 1)
            case WeightsPublished() | WeightsRelayed() | WeightsApplied():
                self._lags.handlers[type(event)](event, delivery.stored_at)
                self._add_weights(event)
            case ActorReported():
                self._add_report(event)
            case _:
                self._counts[type(event).__name__] += 1

    def _add_rollout(self, event: RolloutFinished | Verdict) -> None:
        if event.sandbox is not None:
            self._machines.append(event.sandbox)
        if isinstance(event, RolloutFinished) and event.purpose is Purpose.TRAIN:
            self._turns.append(len(event.turns))

    def _add_step(self, event: StepCompleted) -> None:
        self._steps = max(self._steps, event.step)
        self._train_s += event.train_s
        self._steps_s.append(event.wait_s + event.train_s)
        self._route_bytes.append(event.metrics.get("route_bytes", 0.0))
        self._tokens_read += event.metrics.get("tokens_read", 0.0)
        self._staleness_seen_max = max(self._staleness_seen_max, *event.staleness_tokens, 0)

    def _add_weights(self, event: WeightsPublished | WeightsRelayed | WeightsApplied) -> None:
        match event:
            case WeightsPublished():
                self._add_published(event)
            case WeightsApplied():
                self._counts["mismatches"] += not event.digest_matches
                if event.policy_version > 0:
                    self._pauses_ms.append(event.pause_ms)
            case WeightsRelayed():
                pass

    def _add_published(self, event: WeightsPublished) -> None:
        self._versions.add(event.policy_version)
        if event.kind is SnapshotKind.FULL:
            self._counts["full_uploads_after_v0"] += event.policy_version > 0
        elif event.num_changed:
            num_bytes = sum(shard.num_bytes for shard in event.shards)
            self._ratios.append(event.full_bytes / num_bytes)
        else:
            self._counts["empty_deltas"] += 1

    def _add_report(self, event: ActorReported) -> None:
        for name in (ENGINE_BUSY, MISMATCHES):
            value = event.gauges.get(name, 0.0)
            before = self._gauges.get((event.actor, name), 0.0)
            self._sums[event.actor, name] += value - before if value >= before else value
            self._gauges[event.actor, name] = value

    def figures(self, wall_s: float, replay: dict[str, Any]) -> dict[str, Any]:
        """Return the whole summary."""
        return {
            "wall_s": round(wall_s, 1),
            "seed": self._config.run.seed,
            "midtrain": self._midtrain_figures(),
            "rl": self._rl_figures(),
            "sandbox": self._sandbox_figures(),
            "sync": self._sync_figures(),
            "ledger": self._ledger_figures(),
            "live": {
                "requests": self._counts["InferenceRecorded"],
                "feedback": self._counts["FeedbackReceived"],
                "trained_samples": self._counts["live_trained"],
            },
            "utilization": self._utilization(),
            "replay": replay,
        }

    def _midtrain_figures(self) -> dict[str, Any]:
        done = self._midtrain
        if done is None:
            return {}
        return {
            "tokens": done.num_tokens,
            "loss_first": done.loss_first,
            "loss_last": done.loss_last,
            "heldout_loss": done.heldout_loss,
            "heldout_perplexity": done.heldout_perplexity,
            "wall_s": round(done.wall_s, 1),
        }

    def _rl_figures(self) -> dict[str, Any]:
        return {
            "steps": self._steps,
            "rollouts": len(self._turns),
            "turns_mean": mean(self._turns) if self._turns else 0.0,
            "heldout_pass_before": self._pass_rates.get(0),
            "heldout_pass_after": self._pass_rates.get(self._steps),
            "staleness_max": self._config.trainer.staleness_max,
            "staleness_seen_max": self._staleness_seen_max,
            "wall_s": round(self._rl_to - self._rl_from, 1),
            "route_bytes_per_step": median(self._route_bytes) if self._route_bytes else None,
            "route_bytes_per_token": sum(self._route_bytes) / max(self._tokens_read, 1.0),
        }

    def _sandbox_figures(self) -> dict[str, Any]:
        if not self._machines:
            return {}
        return {
            "backend": "+".join(sorted({m.backend for m in self._machines})),
            "isolation_class": "+".join(sorted({m.isolation_class for m in self._machines})),
            "vms": len(self._machines),
            "boot_ms_p50": median(m.boot_ms for m in self._machines),
        }

    def _sync_figures(self) -> dict[str, Any]:
        return {
            "regions": len(self._config.regions),
            "versions": len(self._versions),
            "ratio_median": median(self._ratios) if self._ratios else None,
            "empty_deltas": self._counts["empty_deltas"],
            "full_uploads_after_v0": self._counts["full_uploads_after_v0"],
            "digest_mismatches": self._num_mismatches(),
            "pause_ms_p50": median(self._pauses_ms) if self._pauses_ms else None,
            "pause_ms_max": max(self._pauses_ms, default=None),
            "pause_share": self._pause_share(),
            "by_region": {name: _region_figures(view) for name, view in self._regions.items()},
        }

    def _pause_share(self) -> float | None:
        """Return the part of a step's time that one replica stands still for a swap; medians."""
        if not self._pauses_ms or not self._steps_s:
            return None
        return median(self._pauses_ms) / 1e3 / max(median(self._steps_s), 1e-9)

    def _num_mismatches(self) -> int:
        """Count the mended ones, which receivers' gauges tell, and the others."""
        healed = sum(value for (_, name), value in self._sums.items() if name == MISMATCHES)
        return max(int(healed), self._counts["mismatches"])

    def _ledger_figures(self) -> dict[str, Any]:
        totals = self._ledger.totals()
        return {
            "generated_tokens": totals.generated,
            "trained": totals.trained,
            "stale": totals.stale,
            "filtered": totals.filtered,
            "infra_failed": totals.infra_failed,
            "judge_failed": totals.judge_failed,
            "in_flight": totals.in_flight,
            "balanced": self._ledger.balanced,
        }

    def _utilization(self) -> dict[str, Any]:
        """Shares of the RL phase's wall clock."""
        wall_s = max(self._rl_to - self._rl_from, 1e-9)
        rollouts = self._config.replicas(Purpose.TRAIN)
        busy = [self._sums[f"generator-{replica}", ENGINE_BUSY] for replica in rollouts]
        return {
            "trainer_busy": min(self._train_s / wall_s, 1.0),
            "generator_busy": min(mean(busy) / wall_s, 1.0) if busy else 0.0,
        }


def _region_figures(region: RegionView) -> dict[str, Any]:
    """Return what the versions after 0 took to a region's slowest replica."""
    points = [point for point in region.deltas if point.policy_version > 0]
    lags_s = sorted(point.lag_s for point in points if point.lag_s > 0)
    return {
        "lag_s_p50": round(median(lags_s), 3) if lags_s else None,
        "lag_s_p95": round(lags_s[ceil(_P95 * len(lags_s)) - 1], 3) if lags_s else None,
        "pause_ms_p50": median(point.pause_ms for point in points) if points else None,
        "num_bytes": region.num_bytes,
    }
