"""How the trainer hands over a new policy version for publication."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from penstock.kernels.element_types import ELEMENT_TYPES
from penstock.messages.weights import WeightsPublished

Snapshot = dict[str, np.ndarray]
"""Tensor name -> array; bfloat16 travels as uint16 bit patterns of the same shape, what else numpy
has no dtype for as `FP8_E4M3` or `E8M0`."""
FP8_E4M3 = ELEMENT_TYPES["F8_E4M3"].storage
"""Bit patterns of float8_e4m3fn: `array.view(FP8_E4M3)`."""
E8M0 = ELEMENT_TYPES["F8_E8M0"].storage
"""Powers of two, biased by 127: the scales of MXFP8's blocks."""


class SnapshotPublisher(Protocol):
    """Makes the full snapshot or delta, stores its objects, and returns the manifest to publish."""

    async def prepare(
        self,
        policy_version: int,
        snapshot: Snapshot,
        *,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> WeightsPublished:
        """Store the objects of one version; the caller publishes the manifest as its effect.

        `probe` is what the trainer computes with it (`actors/policy/probe.py`).

        Idempotent: preparing a version again stores the same objects and returns an equal manifest.
        The first call after a start may come at any version: the base is read back from the store.
        """
        ...
