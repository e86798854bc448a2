"""How large deltas are: measured on real training, drawn from a seed.

The ratios are those of the exponent-class codec on a 10.9M-parameter byte language model with
policy-gradient-like updates (fp32 masters, Adam, bf16 published), each the whole size over the
delta's; how they carry over to a model of this size is not known.
"""

import random

MEASURED_RATIO = {"1e-6": 173.0, "3e-6": 79.7, "1e-5": 34.1, "3e-5": 16.4}
"""Ratio by learning rate; changed fractions 1.29%, 3.12%, 8.2%, 18.9%."""
MEASURED_MERGED_FRACTION = 0.48
"""Size of 8 merged deltas over the sum of their sizes: measured 0.44 to 0.52."""
FIRST_STEP_FACTOR = 3.0
"""The step after an optimizer's start is that much denser."""
SPREAD = 0.1
"""Standard deviation of a version's, and of a rank's, share; an assumption."""


class Sizes:
    """Sizes of one run's objects."""

    def __init__(self, model_bytes: int, num_ranks: int, learning_rate: str, seed: int) -> None:
        """Args: `learning_rate` is a key of MEASURED_RATIO."""
        self._mean_bytes = model_bytes / MEASURED_RATIO[learning_rate]
        self._model_bytes = model_bytes
        self._num_ranks = num_ranks
        self._dice = random.Random(f"sizes/{seed}")

    def delta(self, version: int) -> list[int]:
        """Draw the next delta, in bytes, by rank."""
        factor = FIRST_STEP_FACTOR if version == 1 else 1.0
        whole = self._mean_bytes * factor * self._dice.lognormvariate(0.0, SPREAD)
        shares = [self._dice.lognormvariate(0.0, SPREAD) for _ in range(self._num_ranks)]
        return [round(whole * share / sum(shares)) for share in shares]

    def full(self) -> list[int]:
        """Return a full snapshot's bytes by rank."""
        return [self._model_bytes // self._num_ranks] * self._num_ranks

    def merged(self, num_bytes_of_parts: list[int]) -> list[int]:
        """Return a merged delta's bytes by rank, from those of its deltas."""
        whole = min(sum(num_bytes_of_parts) * MEASURED_MERGED_FRACTION, self._model_bytes)
        return [round(whole / self._num_ranks)] * self._num_ranks
