"""The engine of one process: a learner in memory."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import config_json
from penstock.actors.policy.model import Policy
from penstock.actors.policy.probe import probe_policy
from penstock.actors.policy.snapshot import SnapshotPublisher
from penstock.actors.runtime.context import Context
from penstock.actors.trainer.checkpoint import (
    ALONE,
    Ranks,
    load_checkpoint,
    load_reference,
    save_checkpoint,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.learners import (
    open_first_learner,
    open_learner,
    open_ranked_learner,
)
from penstock.actors.trainer.engines.protocol import Completed, HeldCheckpoint, Place, ReadStepData
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.phase import run_midtraining
from penstock.actors.trainer.off_policy import OffPolicy, measure
from penstock.actors.trainer.preferences.phase import run_preferences
from penstock.actors.trainer.ranks.world import World
from penstock.actors.trainer.step import StepResult, train_step
from penstock.messages.rollout import Turn
from penstock.messages.training import BatchManifest, CheckpointSaved, LedgerRow, SampleEntry
from penstock.messages.weights import WeightsPublished


class LocalEngine:
    """A `TrainingEngine` whose learner, or this rank's part of one, is in the caller's process."""

    def __init__(
        self,
        policy_config: PolicyConfig,
        config: TrainerConfig,
        publisher: SnapshotPublisher | None = None,
        world: World | None = None,
    ) -> None:
        """Hold nothing until a version is made or loaded.

        Args:
            policy_config: Shape of the policy.
            config: Of the run.
            publisher: None where no version is published: in a replay, say.
            world: Of the ranks that make the same calls in the same order; None: it is alone.

        """
        self._policy_config = policy_config
        self._config = config
        self._publisher = publisher
        self._world = world
        self._learner: Learner | None = None

    @property
    def learner(self) -> Learner:
        """The learner, once a version is made or loaded."""
        assert self._learner is not None, "no version was made or loaded"
        return self._learner

    async def make_version_0(self, ctx: Context, seed: int) -> HeldCheckpoint:
        """Make version 0 and save it; see `TrainingEngine.make_version_0`."""
        self._learner = await open_first_learner(
            ctx, self._policy_config, self._config, seed, self._world
        )
        completed = await run_midtraining(ctx, self.learner, self._config, seed)
        if preferred := await run_preferences(ctx, self.learner, self._config, seed):
            digest = preferred.weights_digest
            completed = msgspec.structs.replace(completed, weights_digest=digest)
        saved = await self.save(ctx, completed, {})
        await load_reference(ctx, self.learner)
        return HeldCheckpoint(completed=completed, saved=saved)

    async def load(self, place: Place, object_key: str) -> HeldCheckpoint:
        """Load a checkpoint; see `TrainingEngine.load`."""
        if self._learner is None:
            self._learner = await self._open(place)
            self._learner.set_threads(self._config.num_threads)
        head = await load_checkpoint(place, object_key, self.learner)
        await load_reference(place, self.learner)
        digest = head.weights_digest
        saved = CheckpointSaved(step=head.step, object_key=object_key, weights_digest=digest)
        return HeldCheckpoint(completed=head.completed, saved=saved)

    async def _open(self, place: Place) -> Learner:
        if self._world is None:
            return await open_learner(place, self._policy_config, self._config, 0)
        return await open_ranked_learner(place, self._policy_config, self._config, self._world)

    async def step(
        self, place: Place, manifest: BatchManifest, config: TrainerConfig, read: ReadStepData
    ) -> StepResult:
        """Take a step; see `TrainingEngine.step`."""
        turns, examples = await read()
        return await place.offload(train_step, self.learner, manifest, turns, config, examples)

    async def measure(
        self,
        place: Place,
        samples: Sequence[SampleEntry],
        turns: Mapping[str, Sequence[Turn]],
        config: TrainerConfig,
    ) -> dict[str, OffPolicy]:
        """Measure live samples; see `TrainingEngine.measure`."""
        return await place.offload(measure, self.learner, samples, turns, config)

    async def publish(self, place: Place, policy_version: int) -> WeightsPublished:
        """Publish the weights; see `TrainingEngine.publish`."""
        assert self._publisher is not None, "an engine without a publisher"
        snapshot = await place.offload(_snapshot, self.learner.policy)
        probe = await place.offload(_probe, self.learner)
        return await self._publisher.prepare(
            policy_version,
            snapshot,
            optimizer_step=policy_version,
            config_json=config_json(self._policy_config),
            probe=probe,
        )

    async def save(
        self, place: Place, completed: Completed, ledger: dict[int, LedgerRow]
    ) -> CheckpointSaved:
        """Save a checkpoint; see `TrainingEngine.save`."""
        world = self._world
        ranks = Ranks(rank=world.rank, gather=world.gather) if world else ALONE
        return await save_checkpoint(place, self.learner, completed, ledger, ranks)


def _probe(learner: Learner) -> list[float]:
    with learner.published_weights():
        return probe_policy(learner.policy)


def _snapshot(policy: Policy) -> dict[str, np.ndarray]:
    return {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}
