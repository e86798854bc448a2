"""Everything that `penstock mismatch` measures."""

from typing import Any

import msgspec

from penstock.actors.policy.model import Policy
from penstock.infra.bench.recording import measure_recording
from penstock.infra.mismatch.figures import first_difference, measure
from penstock.infra.mismatch.prices import REMEDIES, route_bytes, time_training
from penstock.infra.mismatch.rollouts import Rollouts, sample_rollouts
from penstock.infra.mismatch.subject import MismatchSubject
from penstock.infra.mismatch.trainers import KERNELS, perturbed, trainer, with_mode

MODES = ("exact", "fast", "off")
_RECORDING_PAIRS = {64: 100}
"""A look; `penstock bench recording` takes many more."""


def report(subject: MismatchSubject, num_tokens: int) -> dict[str, Any]:
    """Sample with the compiled step, then measure every mode and every remedy on the same tokens.

    Returns:
        `exact`, `fast`, `off` (see `MismatchFigures`; `kl_removed`, the share of k3 that is gone;
        `train_ratio`, the time of forward and backward over that of `off`; `first_layer` that
        differs), `remedies`, `routes` (bytes per token) and `recording` (see `measure_recording`).

    Raises:
        ExactModeError: The step cannot be compiled here.

    """
    old, new = with_mode(subject.old, "exact"), with_mode(subject.new, "exact")
    temperature = subject.temperature
    rollouts = sample_rollouts(old, new, subject.prompts, num_tokens, temperature)
    figures: dict[str, Any] = {"source": subject.source, "cached_tokens": rollouts.num_cached}
    prices = time_training(new, rollouts, temperature)
    remedies = _remedies(new, rollouts, temperature, prices)
    exact = msgspec.to_builtins(measure(trainer(new, "exact", temperature), rollouts, 1))
    exact |= {
        "kl_removed": _removed(exact["kl_k3"], remedies[0]["kl_k3"]),
        "train_ratio": prices["exact"],
    }
    figures |= {"exact": exact, "fast": dict(remedies[3]), "off": dict(remedies[0])}
    for mode in MODES[1:]:
        figures[mode]["first_layer"] = first_difference(with_mode(new, mode), rollouts)
    figures["remedies"] = remedies
    figures["routes"] = route_bytes(rollouts, new.config.num_experts)
    figures["recording"] = measure_recording(new, _RECORDING_PAIRS)
    return figures


def _remedies(
    policy: Policy, rollouts: Rollouts, temperature: float, prices: dict[str, float]
) -> list[dict[str, Any]]:
    """Measure each remedy alone and together under each kind of kernels; none comes first.

    Only torch's own kernels, the first, have a price: what perturbs the others takes time itself.
    """
    rows: list[dict[str, Any]] = []
    for kernels in KERNELS:
        first = len(rows)
        for remedy, (gate, replay) in REMEDIES.items():
            run = perturbed(policy, kernels, gate=gate, replay=replay, temperature=temperature)
            row = {"kernels": kernels, "fp32_gate": gate, "replay": replay}
            rows.append(row | msgspec.to_builtins(measure(run, rollouts, 1)))
            rows[-1]["kl_removed"] = _removed(rows[-1]["kl_k3"], rows[first]["kl_k3"])
            if not first:
                rows[-1]["train_ratio"] = prices[remedy]
    return rows


def _removed(kl: float, without: float) -> float:
    """Return the share of the mismatch that is gone."""
    return 1.0 - kl / without if without else 0.0
