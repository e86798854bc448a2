"""Everything that `penstock mismatch` measures, and how it is told."""

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from penstock.actors.policy.model import Policy
from penstock.actors.policy.native import decode_shape, pack_policy
from penstock.actors.trainer.forward import SequenceForward
from penstock.actors.trainer.sequences import micro_batches
from penstock.infra.mismatch.figures import Figures, first_difference, measure
from penstock.infra.mismatch.rollouts import Rollouts, sample_rollouts
from penstock.infra.mismatch.trainers import KERNELS, perturbed, trainer, with_mode
from penstock.kernels.decode import DecodeKernel, round_up
from penstock.kernels.routes import seal_routes

if TYPE_CHECKING:
    from penstock.infra.mismatch.command import Subject

MODES = ("exact", "fast", "off")
_TRAIN_ROUNDS = 5
_DECODE_ROUNDS = 25
"""What recording costs is small: it takes many rounds to see."""
_DECODE_ROWS = 32
_DECODE_POSITIONS = 256
_DECODE_STEPS = 64


def report(subject: "Subject", num_tokens: int) -> dict[str, Any]:
    """Sample with the compiled step, then measure every mode and every remedy on the same tokens.

    Returns:
        `exact`, `fast`, `off` (see `Figures`, and `train_s` of forward and backward), `remedies`,
        `routes` (bytes a token) and `recording` (decode with and without it).

    Raises:
        ExactModeError: The step cannot be compiled here.

    """
    old, new = with_mode(subject.old, "exact"), with_mode(subject.new, "exact")
    temperature = subject.temperature
    rollouts = sample_rollouts(old, new, subject.prompts, num_tokens, temperature)
    figures: dict[str, Any] = {"source": subject.source, "cached_tokens": rollouts.num_cached}
    train_s = _train_s(new, rollouts, temperature)
    for mode in MODES:
        found = measure(trainer(new, mode, temperature), rollouts, 1)
        figures[mode] = msgspec.to_builtins(found) | {"train_s": train_s[mode]}
        if mode != "exact":
            figures[mode]["first_layer"] = first_difference(with_mode(new, mode), rollouts)
    figures["remedies"] = _remedies(new, rollouts, temperature)
    figures["routes"] = _route_bytes(rollouts, new.config.num_experts)
    figures["recording"] = _recording(new)
    return figures


def _remedies(policy: Policy, rollouts: Rollouts, temperature: float) -> list[dict[str, Any]]:
    """Measure each remedy alone and together under each kind of kernels."""
    rows: list[dict[str, Any]] = []
    for kernels in KERNELS:
        for gate, replay in ((False, False), (True, False), (False, True), (True, True)):
            found = measure(
                perturbed(policy, kernels, gate=gate, replay=replay, temperature=temperature),
                rollouts,
                1,
            )
            names = {"kernels": kernels, "fp32_gate": gate, "replay": replay}
            rows.append(names | msgspec.to_builtins(found))
    return rows


def _train_s(policy: Policy, rollouts: Rollouts, temperature: float) -> dict[str, float]:
    """Return the median time of forward and backward of one pass by mode, taken in turns."""
    batch = micro_batches(rollouts.sequences, 2048)[0]
    policies = {mode: with_mode(policy, mode) for mode in MODES}

    def step(mode: str) -> None:
        current = SequenceForward(policies[mode], temperature).run(batch).logprobs
        torch.autograd.backward(current.sum())
        policies[mode].zero_grad(set_to_none=True)

    return _in_turns({mode: (lambda m=mode: step(m)) for mode in MODES}, _TRAIN_ROUNDS)


def _route_bytes(rollouts: Rollouts, num_experts: int) -> dict[str, float]:
    """Return bytes a token, as the engine keeps them and sealed for the wire; and in its cache."""
    sequences = rollouts.sequences
    raw = sum(sequence.routed_experts.nbytes for sequence in sequences)
    sealed = sum(
        len(
            seal_routes(
                torch.as_tensor(sequence.routed_experts), num_experts=num_experts, policy_version=1
            )
        )
        for sequence in sequences
    )
    count = sum(len(sequence.routed_experts) for sequence in sequences)
    cached = rollouts.route_cache_bytes
    return {"raw": raw / count, "sealed": sealed / count, "engine_cache": float(cached)}


def _recording(policy: Policy) -> dict[str, float]:
    """Return seconds of decoding with and without recording, taken in turns, and their ratio."""
    config = policy.config
    positions = min(_DECODE_POSITIONS, round_up(config.max_position_embeddings))
    shape = decode_shape(config, _DECODE_ROWS, positions)
    kernel = DecodeKernel.load(shape)
    assert kernel is not None, "exact mode would have said so"
    weights = pack_policy(policy)
    layers, heads = config.num_hidden_layers, 2 * config.num_key_value_heads
    kv = np.zeros((layers, _DECODE_ROWS, heads, positions, config.head_dim), np.float32)
    size = (_DECODE_ROWS, positions, layers, config.num_experts_per_tok)
    routes = np.zeros(size, np.int16 if shape.wide_routes else np.uint8)
    rows = np.arange(_DECODE_ROWS, dtype=np.int32)
    token_ids = np.random.default_rng(0).integers(0, config.vocab_size, _DECODE_ROWS, np.int32)

    def decode(target: np.ndarray | None) -> None:
        for position in range(min(_DECODE_STEPS, positions)):
            at = np.full(_DECODE_ROWS, position, np.int32)
            kernel.step(weights, kv, target, (token_ids, rows, at), rows)

    works = {"with": lambda: decode(routes), "without": lambda: decode(None)}
    found = _in_turns(works, _DECODE_ROUNDS)
    return {
        "with_s": found["with"],
        "without_s": found["without"],
        "ratio": found["with"] / found["without"],
    }


def _in_turns(works: dict[str, Callable[[], None]], num_rounds: int) -> dict[str, float]:
    """Return the median time of each, after one unmeasured round; rounds alternate."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(num_rounds + 1):
        for name, work in works.items():
            started = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(found[1:]) for name, found in times.items()}


def told(figures: dict[str, Any]) -> str:
    """Tell a report in lines."""
    lines = [
        f"{figures['source']}: {figures['exact']['tokens']} tokens, "
        f"{figures['cached_tokens']} more from the prefix cache",
        f"{'':34}{'k1':>11}{'k3':>11}{'max':>10}{'p99':>10}{'r>2':>8}{'flips':>8}{'train':>8}",
    ]
    fast_s = figures["fast"]["train_s"]
    for mode in MODES:
        lines.append(_line(mode, figures[mode]) + f"{figures[mode]['train_s'] / fast_s:7.2f}x")
    for row in figures["remedies"]:
        remedies = [name for name in ("fp32_gate", "replay") if row[name]]
        lines.append(_line(f"{row['kernels']}: {'+'.join(remedies) or 'none'}", row))
    for mode in MODES[1:]:
        lines.append(f"{mode}: first difference {figures[mode]['first_layer']}")
    routes, recording = figures["routes"], figures["recording"]
    lines.append(
        f"routes: {routes['sealed']:.1f} bytes a token sealed, {routes['raw']:.1f} in the engine, "
        f"which keeps {routes['engine_cache'] / 1e6:.1f} MB of them"
    )
    lines.append(f"decoding with recorded routes takes {recording['ratio']:.3f}x the time without")
    lines += [
        f"{row['expert_format']} experts: held-out loss {row['heldout_loss']:.4f}, "
        f"k3 {row['mismatch']['kl_k3']:.1e}, {row['tokens_per_s']:.0f} tokens/s"
        for row in figures.get("formats", [])
    ]
    return "\n".join(lines)


def _line(name: str, row: dict[str, Any]) -> str:
    found = msgspec.convert(row, Figures)
    flips = sum(found.flips_per_layer) / len(found.flips_per_layer)
    return (
        f"{name:34}{found.kl_k1:11.2e}{found.kl_k3:11.2e}{found.logprob_abs_diff_max:10.1e}"
        f"{found.logprob_abs_diff_p99:10.1e}{found.ratio_above_2:8.4f}{flips:8.4f}"
    )
