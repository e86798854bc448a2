"""Interfaces through which the trainer publishes a new policy version."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from penstock.kernels.element_types import ELEMENT_TYPES
from penstock.messages.weights import UploadWeights, WeightsPublished

Snapshot = dict[str, np.ndarray]
"""Arrays by tensor name. Dtypes that numpy lacks are stored as bit patterns of the same shape:
bfloat16 as uint16, others as `FP8_E4M3` or `E8M0`."""
FP8_E4M3 = ELEMENT_TYPES["F8_E4M3"].storage
"""Storage dtype of float8_e4m3fn bit patterns: `array.view(FP8_E4M3)`."""
E8M0 = ELEMENT_TYPES["F8_E8M0"].storage
"""Storage dtype of MXFP8 block scales: powers of two with a bias of 127."""


class TensorRun(NamedTuple):
    """Consecutive values of one published tensor."""

    name: str
    """Name of the tensor."""
    start: int
    """Index of the first value in the flattened tensor."""
    values: np.ndarray
    """Bit patterns of the values, as in a `Snapshot`, [N]."""


class ShardUploader(Protocol):
    """One rank's part in publishing a version that several ranks hold in shards."""

    async def upload(self, message: UploadWeights, runs: Sequence[TensorRun]) -> None:
        """Upload this rank's runs of a version, then verify a share of all ranks' uploads.

        The runs of all ranks together cover every element of every tensor exactly once.
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
    """Publisher that stores a version as a full snapshot or a delta."""

    async def prepare(
        self,
        policy_version: int,
        snapshot: Snapshot,
        *,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> WeightsPublished:
        """Store the objects of one version and return its manifest, which the caller publishes.

        Idempotent: preparing a version again stores the same objects and returns an equal manifest.
        The first call after a start may be for any version: the base is read from the store.

        Args:
            policy_version: Version to store.
            snapshot: All tensors of the version.
            optimizer_step: Optimizer step that produced the version.
            config_json: Content of the version's config.json.
            probe: Probe values that the trainer computed with it (`actors/policy/probe.py`).

        """
        ...
