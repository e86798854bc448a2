"""Retraining: the newest version as if some samples of users had never existed.

Every step since the newest checkpoint before the first affected one is repeated without them, with
baselines, advantages, caps and divisors recomputed. Rollouts that others sampled in the meantime
are trained as recorded, although versions that had learned from the left-out samples produced some
of them.
"""

import asyncio
from collections.abc import Collection, Mapping

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.credit import LiveCredit
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.checkpoint import (
    checkpoint_before,
    load_checkpoint,
    load_reference,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.preferences.reading import ExampleReader
from penstock.actors.trainer.replay import ReplayLog, on_all_cores
from penstock.actors.trainer.step import train_step
from penstock.actors.trainer.turns import TurnStore
from penstock.messages.base import Event
from penstock.messages.errors import CorruptDataError, NotFoundError
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.rollout import RolloutFinished, TurnSampled
from penstock.messages.training import BatchManifest, SampleEntry


class RetrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a retraining."""

    step_first: int
    """First repeated step."""
    step_last: int
    num_left_out: int
    """Entries of manifests that the run trained and the retraining left out."""
    weights_digest: str


class _Retraining:
    """Applies the deliveries of a log, in order, to the learner."""

    def __init__(
        self,
        learner: Learner,
        config: TrainerConfig,
        log: ReplayLog,
        left_out: Mapping[int, Collection[str]],
        step: int,
    ) -> None:
        self._learner, self._config, self._log = learner, config, log
        self._left_out = left_out
        self._turns = TurnStore(config.turns_bytes_max, log.opener)
        self._preferences = ExampleReader(log.store, log.opener, log.last, learner.policy.config)
        self._credit = LiveCredit()
        self.manifests: list[BatchManifest] = []
        self.step = step
        """Newest step that the learner took."""
        self.num_left_out = 0

    async def add(self, event: Event) -> None:
        match event:
            case TurnSampled():
                self._turns.add_turn(event)
            case RolloutFinished():
                self._turns.add(event.rollout_id, event)
            case LiveSampleJoined():
                self._turns.add(event.sample_id, event)
            case BatchManifest():
                self.manifests.append(event)
            case _:
                pass
        # Streams have no common order: a manifest may come before the turns that it names.
        while self.manifests and self._is_ready(self.manifests[0]):
            await self._take(self.manifests.pop(0))

    def _is_ready(self, manifest: BatchManifest) -> bool:
        return manifest.step <= self.step or self._turns.has(manifest)

    async def _take(self, manifest: BatchManifest) -> None:
        config = self._config.of_step(manifest.settings)
        left = self._without(manifest, config)
        if left.step > self.step:
            turns = await self._turns.load(trained_samples(left), self._log.store, self._log.last)
            examples = await self._preferences.read(left)
            await asyncio.to_thread(train_step, self._learner, left, turns, config, examples)
            self.step = left.step
        self._turns.drop(manifest)

    def _without(self, manifest: BatchManifest, config: TrainerConfig) -> BatchManifest:
        names = self._left_out.get(manifest.step, ())
        entries = [entry for entry in manifest.live if entry.rollout_id not in names]
        self.num_left_out += len(manifest.live) - len(entries)
        # Credit depends on the other samples of the batch and before, so it is computed again.
        fresh = [_uncredited(entry) for entry in entries if entry.outcome.is_trained]
        credited = iter(self._credit.credit(fresh, config.live))
        live = [next(credited) if entry.outcome.is_trained else entry for entry in entries]
        self._credit.commit(live, config.live)
        preferences = [each for each in manifest.preferences if each.name not in names]
        self.num_left_out += len(manifest.preferences) - len(preferences)
        return msgspec.structs.replace(manifest, live=live, preferences=preferences)


def _uncredited(entry: SampleEntry) -> SampleEntry:
    return msgspec.structs.replace(
        entry, advantage=0.0, turn_advantages=[], share=1.0, is_change=False
    )


async def retrain(
    log: ReplayLog,
    policy_config: PolicyConfig,
    config: TrainerConfig,
    left_out: Mapping[int, Collection[str]],
) -> tuple[Learner, RetrainingReport]:
    """Train a run again without some of its users' samples.

    Args:
        left_out: Samples to leave out, by the step that trained them; not empty.

    Returns:
        The learner after the newest step, and a report.

    Raises:
        NotFoundError: The store has no checkpoint before the first of these steps.
        CorruptDataError: The checkpoint is damaged, or the log lacks samples of a batch.
        CodecError: A trained turn cannot be read.

    """
    learner = Learner.initialized(policy_config, config.optimizer, 0)
    learner.set_threads(config.num_threads)
    key = await checkpoint_before(log.store, min(left_out))
    if key is None:
        raise NotFoundError(f"checkpoints/: the run has none before step {min(left_out)}")
    head = await load_checkpoint(log, key, learner)
    await load_reference(log, learner)
    # The run's replicas sampled other weights than the ones trained here.
    learner.versions.have_sampled = False
    run = _Retraining(learner, on_all_cores(config), log, left_out, head.step)
    async for delivery in log.deliveries:
        await run.add(delivery.event)
    if run.manifests:
        raise CorruptDataError(f"step {run.manifests[0].step}: the log lacks samples of its batch")
    return learner, RetrainingReport(
        step_first=head.step + 1,
        step_last=run.step,
        num_left_out=run.num_left_out,
        weights_digest=learner.weights_digest(),
    )
