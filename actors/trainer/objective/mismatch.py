"""Mismatch between the trainer's policy and the one that sampled: sums, then metrics."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.actors.trainer.objective.ratios import Ratios
from penstock.messages.training import VersionDrift


@dataclass(kw_only=True)
class RatioSums:
    """Float64 sums over sampled tokens; sums of micro-batches can be added.

    With r = a / b of a token that b sampled, mean(-log r) (k1) and mean(r - 1 - log r) (k3)
    estimate KL(b || a), mean(r^2) - 1 the chi-square, and (sum r)^2 / (N sum r^2) the effective
    sample size.
    """

    num_tokens: float = 0.0
    k1: float = 0.0
    k3: float = 0.0
    ratio: float = 0.0
    square: float = 0.0
    lowest: float = math.inf
    highest: float = -math.inf

    @classmethod
    def of(cls, log_ratio: torch.Tensor) -> "RatioSums":
        """Return the sums over clamped log ratios [N]."""
        # Float64, because sums over millions of tokens lose small terms in float32.
        log_ratio = log_ratio.detach().double()
        if not log_ratio.numel():
            return cls()
        ratio = log_ratio.exp()
        return cls(
            num_tokens=float(log_ratio.numel()),
            k1=float(-log_ratio.sum()),
            k3=float((ratio - 1 - log_ratio).sum()),
            ratio=float(ratio.sum()),
            square=float((ratio * ratio).sum()),
            lowest=float(ratio.min()),
            highest=float(ratio.max()),
        )

    def add(self, other: "RatioSums") -> None:
        """Add another micro-batch."""
        self.num_tokens += other.num_tokens
        self.k1 += other.k1
        self.k3 += other.k3
        self.ratio += other.ratio
        self.square += other.square
        self.lowest = min(self.lowest, other.lowest)
        self.highest = max(self.highest, other.highest)

    @property
    def ess(self) -> float:
        """Effective sample size as a share of the tokens; 1 for equal policies or no tokens."""
        return self.ratio**2 / (self.num_tokens * self.square) if self.square else 1.0

    def divergences(self, prefix: str) -> dict[str, float]:
        """Return metrics with a prefix; without tokens, those of equal policies."""
        count = max(self.num_tokens, 1.0)
        return {
            f"{prefix}_k1": self.k1 / count,
            f"{prefix}_k3": self.k3 / count,
            f"{prefix}_chi2": self.square / count - 1.0 if self.num_tokens else 0.0,
        }

    def drift(self) -> VersionDrift:
        """Return the drift of a version, for release gates."""
        count = max(self.num_tokens, 1.0)
        return VersionDrift(num_tokens=int(self.num_tokens), kl=self.k3 / count, ess=self.ess)


@dataclass(kw_only=True)
class MismatchSums:
    """Sums of the whole ratio, of its two parts, and of the correction's weights."""

    total: RatioSums
    engine: RatioSums
    """Sums over the tokens with a known engine part."""
    staleness: RatioSums
    weight: float = 0.0
    weight_square: float = 0.0
    num_masked: float = 0.0

    @classmethod
    def of(cls, ratios: Ratios, weights: torch.Tensor) -> "MismatchSums":
        """Return the sums over one micro-batch.

        Args:
            weights: Weights [N] of the correction; ESS = (sum w)^2 / (N sum w^2).

        """
        weights = weights.detach().double()
        return cls(
            total=RatioSums.of(ratios.total),
            engine=RatioSums.of(ratios.engine[ratios.is_measured]),
            staleness=RatioSums.of(ratios.staleness),
            weight=float(weights.sum()),
            weight_square=float((weights * weights).sum()),
            num_masked=float((weights == 0).sum()),
        )

    @classmethod
    def empty(cls) -> "MismatchSums":
        """Return the sums over no tokens."""
        return cls(total=RatioSums(), engine=RatioSums(), staleness=RatioSums())

    def add(self, other: "MismatchSums") -> None:
        """Add another micro-batch."""
        self.total.add(other.total)
        self.engine.add(other.engine)
        self.staleness.add(other.staleness)
        self.weight += other.weight
        self.weight_square += other.weight_square
        self.num_masked += other.num_masked

    def figures(self) -> dict[str, float]:
        """Return the metrics of a step; without tokens, those of equal policies."""
        total = self.total
        count = max(total.num_tokens, 1.0)
        square = self.weight_square * count
        return {
            **total.divergences("mismatch"),
            **self.engine.divergences("mismatch_engine"),
            "mismatch_engine_measured": self.engine.num_tokens / count,
            **self.staleness.divergences("mismatch_staleness"),
            "ess": self.weight**2 / square if square else 1.0,
            "masked_fraction": self.num_masked / count,
            "perplexity_ratio": math.exp(total.k1 / count),
            "ratio_mean": total.ratio / count if total.num_tokens else 1.0,
            "ratio_min": total.lowest if total.num_tokens else 1.0,
            "ratio_max": total.highest if total.num_tokens else 1.0,
            "ratio_ess": total.ess,
        }


def sums_by_version(
    versions: Sequence[int | None], log_ratios: Sequence[torch.Tensor]
) -> dict[int, RatioSums]:
    """Return sums by version; sequences without a version are skipped.

    Args:
        versions: Version of each sequence, or None.
        log_ratios: Clamped log ratios [N] of each sequence.

    """
    found: dict[int, RatioSums] = {}
    for version, log_ratio in zip(versions, log_ratios, strict=True):
        if version is not None:
            found.setdefault(version, RatioSums()).add(RatioSums.of(log_ratio))
    return found
