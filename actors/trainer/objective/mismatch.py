"""How far the trainer's policy is from the one that sampled: sums over tokens, then figures."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from penstock.messages.training import VersionDrift


@dataclass(kw_only=True)
class MismatchSums:
    """Float64 sums over sampled tokens; those of micro-batches add up.

    With r = trainer / sampler probability of a token that the sampler drew, mean(-log r) (k1) and
    mean(r - 1 - log r) (k3) estimate KL(sampler || trainer), mean(r^2) - 1 the chi-square.
    """

    num_tokens: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    square: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0
    num_masked: float = 0.0

    def add(self, other: "MismatchSums") -> None:
        """Add another micro-batch."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def figures(self) -> dict[str, float]:
        """Return the metrics of a step; with no token, those of equal policies."""
        count = max(self.num_tokens, 1.0)
        square = self.weight_square * count
        return {
            "mismatch_k1": self.k1 / count,
            "mismatch_k3": self.k3 / count,
            "mismatch_chi2": self.square / count - 1.0 if self.num_tokens else 0.0,
            "ess": self.weight**2 / square if square else 1.0,
            "masked_fraction": self.num_masked / count,
            "perplexity_ratio": math.exp(self.k1 / count),
        }

    def drift(self) -> VersionDrift:
        """Return what gates ask of a version; with the ratios as weights."""
        figures = self.figures()
        return VersionDrift(
            num_tokens=int(self.num_tokens), kl=figures["mismatch_k3"], ess=figures["ess"]
        )


def sums_by_version(
    versions: Sequence[int | None], log_ratios: Sequence[torch.Tensor]
) -> dict[int, MismatchSums]:
    """Sum per version over whole sequences; those of no version are left out.

    Args:
        versions: of each sequence.
        log_ratios: [N] log r of each, clamped.

    """
    found: dict[int, MismatchSums] = {}
    for version, log_ratio in zip(versions, log_ratios, strict=True):
        if version is not None:
            sums = mismatch_sums(log_ratio, log_ratio.exp())
            found.setdefault(version, MismatchSums()).add(sums)
    return found


def mismatch_sums(log_ratio: torch.Tensor, weights: torch.Tensor) -> MismatchSums:
    """Sum over the tokens of one micro-batch.

    Args:
        log_ratio: [N] log r, clamped.
        weights: [N] of the correction; ESS = (sum w)^2 / (N sum w^2).

    """
    log_ratio, weights = log_ratio.detach().double(), weights.detach().double()
    ratio = log_ratio.exp()
    return MismatchSums(
        num_tokens=float(log_ratio.numel()),
        k1=float(-log_ratio.sum()),
        k3=float((ratio - 1 - log_ratio).sum()),
        square=float((ratio * ratio).sum()),
        weight=float(weights.sum()),
        weight_square=float((weights * weights).sum()),
        num_masked=float((weights == 0).sum()),
    )
