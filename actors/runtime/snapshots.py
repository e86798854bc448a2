"""How the trainer hands a new policy version to whoever ships it."""

from typing import Protocol

import numpy as np

from penstock.messages.weights import WeightsPublished

Snapshot = dict[str, np.ndarray]
"""Tensor name -> array; bfloat16 travels as uint16 bit patterns of the same shape."""


class SnapshotPublisher(Protocol):
    """Makes the anchor or delta, stores its objects, and returns the manifest to publish."""

    async def prepare(
        self, policy_version: int, snapshot: Snapshot, *, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        """Store the objects of one version; the caller publishes the manifest as its effect.

        Idempotent: preparing a version again stores the same objects and returns an equal manifest.
        The first call after a start may come at any version: the base is read back from the store.
        """
        ...
