"""The measurements of `penstock mismatch`, and the cost of each remedy."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from penstock.actors.policy.model import Policy
from penstock.actors.trainer.batching.cuts import micro_batches
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.sequences import TrainingSequence
from penstock.infra.mismatch.figures import first_difference, measure
from penstock.infra.mismatch.recording import measure_recording
from penstock.infra.mismatch.rollouts import Rollouts, sample_rollouts
from penstock.infra.mismatch.subject import MismatchSubject
from penstock.infra.mismatch.trainers import KERNELS, perturbed, trainer, with_mode
from penstock.kernels.route_segments import seal_routes

REMEDIES = {
    "none": (False, False),
    "fp32_gate": (True, False),
    "replay": (False, True),
    "fp32_gate+replay": (True, True),
}
"""(scores are float32, routes are replayed) by name; both together are fast mode."""

_PASS_TOKENS = 2048
_NUM_ROUNDS = 7


def time_training(policy: Policy, rollouts: Rollouts) -> dict[str, float]:
    """Time forward and backward of one pass with each remedy and in exact mode, alternating.

    Returns:
        The median over rounds of the time, relative to `none` in the same round.

    """
    batch = micro_batches(rollouts.sequences, _PASS_TOKENS)[0]
    works = {
        name: _pass(with_mode(policy, "fast" if gate else "off"), batch, replay)
        for name, (gate, replay) in REMEDIES.items()
    }
    works["exact"] = _pass(with_mode(policy, "exact"), batch, True)
    # All works in each round, so that drift affects them alike; the first round warms up.
    rounds = [{name: _time_s(work) for name, work in works.items()} for _ in range(_NUM_ROUNDS + 1)]
    return {
        name: statistics.median(each[name] / each["none"] for each in rounds[1:]) for name in works
    }


def route_bytes(rollouts: Rollouts, num_experts: int) -> dict[str, float]:
    """Return bytes per token in the engine and sealed, and bytes of the engine's cache."""
    if num_experts == 0:
        return {"raw": 0.0, "sealed": 0.0, "engine_cache": 0.0}
    routes = [sequence.routed_experts for sequence in rollouts.sequences]
    sealed = [
        seal_routes(torch.as_tensor(each), num_experts=num_experts, policy_version=1)
        for each in routes
    ]
    count = sum(map(len, routes))
    return {
        "raw": sum(each.nbytes for each in routes) / count,
        "sealed": sum(map(len, sealed)) / count,
        "engine_cache": float(rollouts.route_cache_bytes),
    }


def _pass(policy: Policy, batch: list[TrainingSequence], replays: bool) -> Callable[[], None]:
    def run() -> None:
        forward = SequenceForward(policy, replays=replays)
        torch.autograd.backward(forward.run(batch).logprobs.sum())
        policy.zero_grad(set_to_none=True)

    return run


def _time_s(work: Callable[[], None]) -> float:
    # CPU time, which excludes other processes.
    started = time.process_time()
    work()
    return time.process_time() - started


MODES = ("exact", "fast", "off")
_RECORDING_PAIRS = {64: 100}
"""Few pairs, for a quick look; `python -m tests.lab recording` takes many more."""


def report(subject: MismatchSubject, num_tokens: int) -> dict[str, Any]:
    """Sample with the compiled step, then measure every mode and remedy on the same tokens.

    Returns:
        `exact`, `fast`, `off` (see `MismatchMetrics`; `kl_removed`, the removed share of k3;
        `train_ratio`, the time of forward and backward relative to `off`; `first_layer` that
        differs), `remedies`, `routes` (bytes per token) and `recording` (see `measure_recording`).

    Raises:
        ExactModeError: The step cannot be compiled here.

    """
    old, new = with_mode(subject.old, "exact"), with_mode(subject.new, "exact")
    temperature = subject.temperature
    rollouts = sample_rollouts(old, new, subject.prompts, num_tokens, temperature)
    found: dict[str, Any] = {"source": subject.source, "cached_tokens": rollouts.num_cached}
    costs = time_training(new, rollouts)
    remedies = _remedies(new, rollouts, costs)
    exact = msgspec.to_builtins(measure(trainer(new, "exact"), rollouts, 1))
    exact |= {
        "kl_removed": _removed(exact["kl_k3"], remedies[0]["kl_k3"]),
        "train_ratio": costs["exact"],
    }
    found |= {"exact": exact, "fast": dict(remedies[3]), "off": dict(remedies[0])}
    for mode in MODES[1:]:
        found[mode]["first_layer"] = first_difference(with_mode(new, mode), rollouts)
    found["remedies"] = remedies
    found["routes"] = route_bytes(rollouts, new.config.num_experts)
    found["recording"] = measure_recording(new, _RECORDING_PAIRS)
    return found


def _remedies(policy: Policy, rollouts: Rollouts, costs: dict[str, float]) -> list[dict[str, Any]]:
    """Measure each remedy and all together under each kind of kernels, `none` first."""
    rows: list[dict[str, Any]] = []
    for kernels in KERNELS:
        first = len(rows)
        for remedy, (gate, replay) in REMEDIES.items():
            run = perturbed(policy, kernels, gate=gate, replay=replay)
            row = {"kernels": kernels, "fp32_gate": gate, "replay": replay}
            rows.append(row | msgspec.to_builtins(measure(run, rollouts, 1)))
            rows[-1]["kl_removed"] = _removed(rows[-1]["kl_k3"], rows[first]["kl_k3"])
            # Only torch's kernels, the first, are timed: perturbing the others takes time itself.
            if not first:
                rows[-1]["train_ratio"] = costs[remedy]
    return rows


def _removed(kl: float, without: float) -> float:
    return 1.0 - kl / without if without else 0.0
