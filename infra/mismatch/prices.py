"""What the remedies cost: the time of training with each, the bytes of recorded routes."""

import statistics
import time
from collections.abc import Callable

import torch

from penstock.actors.policy.model import Policy
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.sequences import TrainingSequence, micro_batches
from penstock.infra.mismatch.rollouts import Rollouts
from penstock.infra.mismatch.trainers import with_mode
from penstock.kernels.routes import seal_routes

REMEDIES = {
    "none": (False, False),
    "fp32_gate": (True, False),
    "replay": (False, True),
    "fp32_gate+replay": (True, True),
}
"""By name: whether scores are float32, and whether routes are replayed. Both are fast mode."""

_PASS_TOKENS = 2048
_NUM_ROUNDS = 7


def time_training(policy: Policy, rollouts: Rollouts, temperature: float) -> dict[str, float]:
    """Time forward and backward of one pass with each remedy and in exact mode, in turns.

    Returns:
        The median over rounds of its time over that of `none` in the same round.

    """
    batch = micro_batches(rollouts.sequences, _PASS_TOKENS)[0]
    works = {
        name: _pass(with_mode(policy, "fast" if gate else "off"), batch, temperature, replay)
        for name, (gate, replay) in REMEDIES.items()
    }
    works["exact"] = _pass(with_mode(policy, "exact"), batch, temperature, True)
    rounds = [{name: _time_s(work) for name, work in works.items()} for _ in range(_NUM_ROUNDS + 1)]
    return {
        name: statistics.median(each[name] / each["none"] for each in rounds[1:]) for name in works
    }


def route_bytes(rollouts: Rollouts, num_experts: int) -> dict[str, float]:
    """Return bytes per token, in the engine and sealed for the wire, and those of its cache."""
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


def _pass(
    policy: Policy, batch: list[TrainingSequence], temperature: float, replays: bool
) -> Callable[[], None]:
    def run() -> None:
        forward = SequenceForward(policy, temperature, replays=replays)
        torch.autograd.backward(forward.run(batch).logprobs.sum())
        policy.zero_grad(set_to_none=True)

    return run


def _time_s(work: Callable[[], None]) -> float:
    """Return processor time: other processes do not count."""
    started = time.process_time()
    work()
    return time.process_time() - started
