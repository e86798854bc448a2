"""How the trainer hands over a new policy version for publication."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.kernels.element_types import ELEMENT_TYPES
from penstock.messages.weights import UploadWeights, WeightsPublished

Snapshot = dict[str, np.ndarray]
"""Tensor name -> array; bfloat16 travels as uint16 bit patterns of the same shape, what else numpy
has no dtype for as `FP8_E4M3` or `E8M0`."""
FP8_E4M3 = ELEMENT_TYPES["F8_E4M3"].storage
"""Bit patterns of float8_e4m3fn: `array.view(FP8_E4M3)`."""
E8M0 = ELEMENT_TYPES["F8_E8M0"].storage
"""Powers of two, biased by 127: the scales of MXFP8's blocks."""


class TensorRun(NamedTuple):
    """A run of one published tensor, and its values."""

    name: str
    """Of the tensor."""
    start: int
    """Of the run's first element in the flattened tensor."""
    values: np.ndarray
    """[N] bit patterns, as in a `Snapshot`."""


class ShardUploader(Protocol):
    """A rank's part in publishing versions that several ranks hold together."""

    async def upload(self, message: UploadWeights, runs: Sequence[TensorRun]) -> None:
        """Upload this rank's runs of a version, then verify a share of what all ranks uploaded.

        All ranks' runs together are every element of every tensor once.
        """
        ...


class ShardedVersion(NamedTuple):
    """A version that ranks hold in shards, as the trainer describes it: it holds no weights."""

    policy_version: int
    shapes: Mapping[str, Sequence[int]]
    """Tensor name -> shape."""
    float32: Collection[str]
    """Tensors that are float32; the others are bfloat16."""
    config_json: str
    """Settings of the policy."""
    probe: Sequence[float]
    """What the version computes (`actors/policy/probe.py`)."""


PublishShards = Callable[[ShardedVersion], Awaitable[WeightsPublished]]
"""Has all ranks upload a version, commits it, and returns its manifest."""


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
