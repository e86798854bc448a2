"""The interface of whatever holds the weights and takes the steps."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec

from penstock.actors.runtime.context import Context
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.off_policy import OffPolicy
from penstock.actors.trainer.preferences.examples import PreferenceExample
from penstock.actors.trainer.step import StepResult
from penstock.messages.bus import ObjectStore
from penstock.messages.rollout import Turn
from penstock.messages.training import (
    BatchManifest,
    CheckpointSaved,
    LedgerRow,
    MidtrainCompleted,
    SampleEntry,
    StepCompleted,
)
from penstock.messages.weights import WeightsPublished

P = ParamSpec("P")
R = TypeVar("R")
Completed = MidtrainCompleted | StepCompleted
"""The event that announces a version."""


class Place(Protocol):
    """What an engine uses of its surroundings; every `Context` is one."""

    @property
    def store(self) -> ObjectStore:
        """The run's objects."""
        ...

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in a thread."""
        ...


class HeldCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The version that an engine holds."""

    completed: Completed
    saved: CheckpointSaved
    """Where it was loaded from."""

    @property
    def step(self) -> int:
        """= policy version."""
        return self.saved.step


class StepData(NamedTuple):
    """What a step reads of the log beside its manifest."""

    turns: Mapping[str, Sequence[Turn]]
    """Turns of every trained sample, by rollout or request id."""
    examples: Sequence[PreferenceExample]
    """The manifest's corrections and judgments, in its order."""


ReadStepData = Callable[[], Awaitable[StepData]]
"""Reads the data of a step, for engines that train in the caller's process."""


class TrainingEngine(Protocol):
    """Holds weights and optimizer, which only `load` and `step` change.

    One call at a time. After an error, `load` puts the engine into a defined state again.
    """

    async def make_version_0(self, ctx: Context, seed: int) -> HeldCheckpoint:
        """Make version 0 (model, mid-training, preferences), save it, and hold it.

        Raises:
            CorruptDataError: What the store holds for it is damaged.

        """
        ...

    async def load(self, place: Place, object_key: str) -> HeldCheckpoint:
        """Hold the version of a checkpoint, and version 0 as the reference.

        Raises:
            NotFoundError: No such checkpoint.
            CorruptDataError: It is damaged, or of another policy.

        """
        ...

    async def step(
        self, place: Place, manifest: BatchManifest, config: TrainerConfig, read: ReadStepData
    ) -> StepResult:
        """Take the step of a stored manifest; the same version and manifest give the same bits.

        Args:
            place: Of the caller.
            manifest: Of the next step.
            config: Of this step.
            read: Reads the step's data, if this engine needs them here.

        Raises:
            ValueError: The data are not what the manifest counted.
            LookupError: Data that are missing.

        """
        ...

    async def measure(
        self,
        place: Place,
        samples: Sequence[SampleEntry],
        turns: Mapping[str, Sequence[Turn]],
        config: TrainerConfig,
    ) -> dict[str, OffPolicy]:
        """Return how far the policy has moved from those that drew live samples."""
        ...

    async def publish(self, place: Place, policy_version: int) -> WeightsPublished:
        """Store the version for the relays; return its manifest."""
        ...

    async def save(
        self, place: Place, completed: Completed, ledger: dict[int, LedgerRow]
    ) -> CheckpointSaved:
        """Store a checkpoint of the version; one that has a checkpoint keeps it."""
        ...
