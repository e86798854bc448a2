"""The summary of a run, `runs/<id>/summary.json`, from the monitor's state of its log."""

import os
from statistics import median
from typing import Any

import msgspec

from penstock.actors.monitor.behavior_views import behavior_metrics
from penstock.actors.monitor.state import MonitorState, RegionView
from penstock.actors.monitor.task_views import EvalPoint
from penstock.infra.config.settings import RunConfig
from penstock.messages.reward import VersionComparison
from penstock.messages.task import Purpose
from penstock.messages.telemetry import percentile

PASS_BAR = 0.75
"""Held-out pass rate that counts as learned, if two evaluations in a row reach it."""
_STEP_METRICS = (
    *("entropy", "kl_reference", "grad_norm", "ess", "ratio_ess", "masked_fraction"),
    *("clipped_fraction", "mismatch_k3", "mismatch_engine_k3", "mismatch_staleness_k3"),
)


def run_summary(
    state: MonitorState,
    config: RunConfig,
    replay: dict[str, Any],
    *,
    started_at: float,
    ended_at: float,
) -> dict[str, Any]:
    """Return the summary.

    Args:
        started_at: Unix seconds of the start; for a resumed run, times count from the log's start.

    """
    live, ledger = state.live, state.ledger
    return {
        "wall_s": round(ended_at - started_at, 1),
        "seed": config.run.seed,
        "cached": state.run.cached,
        "midtrain": _midtrain(state),
        "tasks": _tasks(state),
        "rl": _rl(state, config) | _times(state, started_at),
        "objective": _objective(state),
        "behavior": _behavior(state),
        "sandbox": _sandbox(state),
        "sync": _sync(state, config),
        "ledger": {
            ("generated_tokens" if fate == "generated" else fate): num_tokens
            for fate, num_tokens in msgspec.structs.asdict(ledger.totals).items()
        }
        | {"balanced": ledger.balanced},
        "preferences": ledger.preferences,
        "charges": _charges(state),
        "judges": {
            name: {
                "version": view.version,
                "scored": view.num_scored,
                "failed": view.num_failed,
                "score_mean": view.score_mean,
                "disagreement_mean": view.disagreement_mean,
                "prompt_tokens": view.num_prompt_tokens,
                "reply_tokens": view.num_reply_tokens,
                "note": view.note,
            }
            for name, view in state.judges.items()
        },
        "live": {
            "requests": live.num_requests,
            "feedback": live.num_feedback,
            "trained_samples": live.num_trained,
        },
        "compute": _compute(state),
        "utilization": _utilization(state, config),
        "replay": replay,
    }


def _charges(state: MonitorState) -> dict[str, Any]:
    view = state.charges
    return {
        "charged": view.num_proven,
        "suspected": view.num_suspected,
        "quarantined": view.num_quarantined,
        "items": {
            one.item: {"task": one.task_id, "cause": one.cause, "at": one.at}
            for one in view.quarantined
        },
    }


def _midtrain(state: MonitorState) -> dict[str, Any]:
    view = state.midtrain
    if not state.run.rl_started_at:
        return {}
    return {
        "tokens": view.num_tokens,
        "loss_first": view.loss_first,
        "loss_last": view.loss_last,
        "heldout_loss": view.heldout_loss,
        "heldout_perplexity": view.heldout_perplexity,
        "wall_s": round(view.wall_s, 1),
        "saves": view.num_saves,
        "resumed": view.num_resumed,
    }


def _tasks(state: MonitorState) -> dict[str, Any]:
    view = state.tasks
    return {
        "groups": view.num_groups,
        "fresh_left": view.num_fresh,
        "revisit_share": view.num_revisits / max(view.num_groups, 1),
        "train_pass_rate": {
            name: {"rollouts": source.num_judged, "pass_rate": source.pass_rate}
            for name, source in view.sources.items()
        },
        "evaluations": {
            f"{name or 'heldout'} {when}": _eval_metrics(point)
            for name, points in view.sets.items()
            for when, point in (("before", points[0]), ("after", points[-1]))
        },
        "evaluations_cost": {
            "evaluations": view.num_evals,
            "attempts": view.num_eval_attempts,
            "wall_s": round(view.eval_s, 1),
        },
    }


def _eval_metrics(point: EvalPoint) -> dict[str, Any]:
    return {
        "policy_version": point.policy_version,
        "attempts": point.num_tasks,
        "pass_rate": point.pass_rate,
        **{f"pass_at_{k}": value for k, value in point.pass_at_k.items()},
        **{f"pass_at_{k}_low": low for k, (low, _) in point.intervals.items()},
        **{f"pass_at_{k}_high": high for k, (_, high) in point.intervals.items()},
        **(_gain(point.comparison) if point.comparison else {}),
        **{f"pass_rate_{name}": value for name, value in point.by_source.items() if name},
        "by_category": point.by_category,
    }


def _gain(found: VersionComparison) -> dict[str, float]:
    return {
        f"gain_on_version_{found.policy_version}": found.difference.value,
        "gain_low": found.difference.low,
        "gain_high": found.difference.high,
        "gain_p": found.p_value,
    }


def _times(state: MonitorState, started_at: float) -> dict[str, float | None]:
    """Return seconds until the first step, and until the first of two evaluations at the bar."""
    if state.run.started_at:
        # A resumed run counts from its first start.
        started_at = min(started_at, state.run.started_at)
    good = [point.pass_rate >= PASS_BAR for point in state.evals]
    held = [point.at for point, *two in zip(state.evals, good, good[1:], strict=False) if all(two)]
    return {
        "first_reward_s": round(state.steps[0].at - started_at, 1) if state.steps else None,
        "pass_075_s": round(held[0] - started_at, 1) if held else None,
    }


def _rl(state: MonitorState, config: RunConfig) -> dict[str, Any]:
    training, rollouts = state.training, state.rollouts
    pass_rates = {e.policy_version: e.num_solved / max(e.num_tasks, 1) for e in state.evals}
    return {
        "steps": state.run.step,
        "finish_reason": state.run.finish_reason,
        "given_up": state.run.is_given_up,
        "steps_skipped": training.num_skipped,
        "rollouts": rollouts.num_train,
        "turns_mean": rollouts.num_train_turns / max(rollouts.num_train, 1),
        "segments_mean": rollouts.num_train_segments / max(rollouts.num_train, 1),
        "summaries": rollouts.num_summaries,
        "summary_token_share": rollouts.num_summary_tokens / max(rollouts.num_sampled_tokens, 1),
        "heldout_pass_before": pass_rates.get(0),
        "heldout_pass_after": pass_rates.get(state.run.step),
        "staleness_max": config.trainer.staleness_max,
        "staleness_seen_max": state.staleness.seen_max,
        "wall_s": round(_rl_wall_s(state), 1),
        "step_wait_s_p95": training.wait_s_p95,
        "route_bytes_per_step": training.route_bytes_p50,
        "route_bytes_per_token": training.route_bytes / max(training.tokens_read, 1.0),
    }


def _objective(state: MonitorState) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in _STEP_METRICS:
        values = [step.metrics[name] for step in state.steps if name in step.metrics]
        if values:
            found[name] = sum(values) / len(values)
    return found


def _behavior(state: MonitorState) -> dict[str, Any]:
    view = state.behavior
    found: dict[str, Any] = {}
    if view.evals:
        found = {
            "before": behavior_metrics(view.evals[0]),
            "after": behavior_metrics(view.evals[-1]),
        }
    if view.gains:
        found["gain"] = msgspec.structs.asdict(view.gains[0])
        found["gain_by_set"] = {
            one.eval_set: msgspec.structs.asdict(one) for one in view.gains if one.eval_set
        }
    return found


def _rl_wall_s(state: MonitorState) -> float:
    return state.run.finished_at - state.run.rl_started_at


def _sandbox(state: MonitorState) -> dict[str, Any]:
    view = state.sandbox
    if not view.num_vms:
        return {}
    return {
        "backend": view.backend,
        "isolation_class": view.isolation_class,
        "vms": view.num_vms,
        "boot_ms_p50": view.boot_ms_p50,
    }


def _sync(state: MonitorState, config: RunConfig) -> dict[str, Any]:
    published = state.published
    return {
        "regions": len(config.regions),
        "versions": published.num_versions,
        "ratio_median": published.ratio_p50,
        "empty_deltas": published.num_empty_deltas,
        "full_uploads_after_v0": published.num_full_after_v0,
        "digest_mismatches": _num_mismatches(state),
        "pause_ms_p50": published.pause_ms_p50,
        "pause_ms_max": published.pause_ms_max,
        "pause_share": _pause_share(state),
        "by_region": {name: _region(view) for name, view in state.regions.items()},
    }


def _pause_share(state: MonitorState) -> float | None:
    """Return the share of a step in which a replica pauses to swap weights, by medians."""
    pause_ms, step_s = state.published.pause_ms_p50, state.training.step_s_p50
    if pause_ms is None or step_s is None:
        return None
    return pause_ms / 1e3 / max(step_s, 1e-9)


def _num_mismatches(state: MonitorState) -> int:
    # Repaired ones appear only in the receivers' gauges.
    repaired = sum(view.totals.get("digest_mismatches", 0.0) for view in state.actors.values())
    return max(int(repaired), sum(view.num_digest_mismatches for view in state.regions.values()))


def _region(region: RegionView) -> dict[str, Any]:
    points = [point for point in region.deltas if point.policy_version > 0]
    lags_s = [point.lag_s for point in points if point.lag_s > 0]
    return {
        "lag_s_p50": round(median(lags_s), 3) if lags_s else None,
        "lag_s_p95": round(percentile(lags_s, 95), 3) if lags_s else None,
        "pause_ms_p50": median(point.pause_ms for point in points) if points else None,
        "num_bytes": region.num_bytes,
    }


def _generator_region(actor: str) -> str:
    """Return the region of `generator-<region>` or `generator-<region>.<name>`, or ""."""
    role, _, replica = actor.partition("-")
    return replica.partition(".")[0] if role == "generator" else ""


def _compute(state: MonitorState) -> dict[str, Any]:
    """Return CPU seconds and tokens by role; empty if they were not measured."""
    view = state.compute
    if not view.processor_s:
        return {}
    return {
        "processor_s": round(view.processor_s, 1),
        "rl_processor_s": round(view.rl_processor_s, 1),
        "machines_s": round(view.machines_s, 1),
        "roles": {
            name: {
                "processor_s": round(role.processor_s, 1),
                "share": round(role.share, 3),
                "rl_share": round(role.rl_share, 3),
            }
            | {f"tokens_{what}": count for what, count in role.tokens.items() if count}
            for name, role in view.roles.items()
        },
    }


def _utilization(state: MonitorState, config: RunConfig) -> dict[str, Any]:
    wall_s = max(_rl_wall_s(state), 1e-9)
    regions = config.regions_serving(Purpose.TRAIN)
    actors = [view for name, view in state.actors.items() if _generator_region(name) in regions]
    # Only generators that serve training.
    busy_s = sum(view.totals.get("engine_busy_s", 0.0) for view in actors)
    return {
        "trainer_busy": min(state.training.train_s / wall_s, 1.0),
        "generator_busy": min(busy_s / max(len(actors), 1) / wall_s, 1.0),
        "processors_busy": state.compute.rl_processor_s / wall_s / (os.cpu_count() or 1),
    }
