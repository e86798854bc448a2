"""The trainer: stage one, then one step for each stored batch manifest.

```
 facts ──▶ Batcher ──propose──▶ BatchManifest ──▶ log ──▶ on_batch_manifest
                                  (one a step wins)            │ all turns here?
                                                               ▼
        StepCompleted, WeightsPublished, CheckpointSaved ◀── train_step (worker thread)
```
Only stored manifests are trained, in the order of steps, so a trainer that is killed at any point
starts from its newest checkpoint, reads the log, and takes the same steps to the same bits; what it
publishes again is refused as known. Nothing is trained twice and nothing is lost.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from penstock.actors.policy.checkpoint import as_numpy, config_json, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.ledger import Ledger
from penstock.actors.runtime.snapshots import SnapshotPublisher
from penstock.actors.trainer.batcher import Batcher
from penstock.actors.trainer.checkpoint import (
    drop_old_checkpoints,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.sequences import check_trajectory
from penstock.actors.trainer.stage_one import run_stage_one
from penstock.actors.trainer.step import train_step
from penstock.actors.trainer.turns import TurnStore
from penstock.messages.base import Event
from penstock.messages.control import RunFinished
from penstock.messages.errors import PenstockError
from penstock.messages.feedback import FeedbackRetracted, LiveSampleJoined
from penstock.messages.pacing import CreditsChanged
from penstock.messages.reward import Verdict
from penstock.messages.rollout import RolloutFinished, Turn, TurnSampled
from penstock.messages.task import Purpose
from penstock.messages.training import (
    BatchManifest,
    CheckpointSaved,
    MidtrainCompleted,
    StepCompleted,
)
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)


class TrainingError(PenstockError, RuntimeError):
    """Training cannot go on from this log; the actor fails, rather than set the event aside."""


class NondeterminismError(TrainingError):
    """A step trained again gave other weights than the log records for it."""


class Trainer(Actor):
    """Owns the weights. Of several trainers of one run, the log makes one out of them."""

    role = "trainer"
    follows: ClassVar[tuple[type[Event], ...]] = (
        TurnSampled,
        RolloutFinished,
        Verdict,
        LiveSampleJoined,
        FeedbackRetracted,
        CreditsChanged,
        BatchManifest,
        StepCompleted,
    )

    def __init__(
        self,
        config: TrainerConfig,
        policy_config: PolicyConfig,
        publisher: SnapshotPublisher,
        seed: int,
    ) -> None:
        self._config = config
        self._policy_config = policy_config
        self._publisher = publisher
        self._seed = seed
        self._learner = Learner(policy_config, config.optimizer, seed)
        self._batcher = Batcher(config)
        self._ledger = Ledger()
        self._turns = TurnStore()
        self._manifests: dict[int, BatchManifest] = {}
        self._digests: dict[int, str] = {}
        self._completed: MidtrainCompleted | StepCompleted | None = None
        self._step = 0
        self._step_proposed = 0
        self._idle_since = 0.0
        self._is_idle = asyncio.Event()
        self._is_training = asyncio.Event()

    async def start(self, ctx: Context) -> Effects:
        """Take up the newest checkpoint, or make version 0."""
        key = await newest_checkpoint(ctx.store)
        if key is None:
            self._completed = await run_stage_one(ctx, self._learner, self._config, self._seed)
            saved: Effects = await self._save(ctx)
        else:
            head = await load_checkpoint(ctx.store, key, self._learner)
            self._step, self._completed = head.step, head.completed
            saved = (
                CheckpointSaved(step=head.step, object_key=key, weights_digest=head.weights_digest),
            )
        self._set_idle(ctx)
        ctx.spawn("watch", self._watch(ctx))
        return [*saved, self._completed, await self._publish(ctx), *self._finish()]

    async def stop(self, ctx: Context) -> Effects:
        """Save where training stands."""
        return await self._save(ctx) if self._completed is not None else ()

    async def on_turn_sampled(self, event: TurnSampled, ctx: Context) -> Effects:
        """See that a group runs."""
        self._ledger.add_turn(event)
        self._batcher.add_turn(event)
        return ()

    async def on_rollout_finished(self, event: RolloutFinished, ctx: Context) -> Effects:
        """Keep the turns; a rollout that cannot be trained counts as an infrastructure failure."""
        if event.purpose is not Purpose.TRAIN:
            return ()
        fault = self._fault(event.rollout_id, event.turns)
        self._turns.add(event.rollout_id, event.turns)
        self._batcher.add_rollout(event, fault)
        return await self._advance(ctx)

    async def on_verdict(self, event: Verdict, ctx: Context) -> Effects:
        """See a reward."""
        self._batcher.add_verdict(event)
        return await self._advance(ctx)

    async def on_live_sample_joined(self, event: LiveSampleJoined, ctx: Context) -> Effects:
        """See a user's sample; it joins the next batch."""
        self._ledger.add_live(event)
        self._batcher.add_live(event, self._fault(event.request_id, [event.turn]))
        self._turns.add(event.request_id, [event.turn])
        return await self._advance(ctx)

    async def on_feedback_retracted(self, event: FeedbackRetracted, ctx: Context) -> Effects:
        """Let an untrained sample go."""
        self._batcher.retract(event)
        return ()

    async def on_credits_changed(self, event: CreditsChanged, ctx: Context) -> Effects:
        """See how many groups may still come."""
        self._batcher.add_credits(event)
        return await self._advance(ctx)

    async def on_batch_manifest(self, event: BatchManifest, ctx: Context) -> Effects:
        """Account for its samples, and train it if it is the next one."""
        self._batcher.commit(event)
        self._ledger.add_manifest(event)
        if event.step > self._step:
            self._manifests[event.step] = event
        else:
            self._turns.drop(event)
        return await self._advance(ctx)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Remember what a step must give."""
        self._check_digest(event.step, event.weights_digest)
        return ()

    def _fault(self, sample_id: str, turns: Sequence[Turn]) -> str:
        """Return why a sample cannot be trained, or an empty string."""
        try:
            check_trajectory(sample_id, turns, self._policy_config)
        except ValueError as error:
            log.error("%s is left out: %s", sample_id, error)
            return str(error)
        return ""

    async def _advance(self, ctx: Context) -> Effects:
        """Train what the log has ready, then propose the next batch if there is one."""
        effects: list[Event] = []
        while manifest := self._manifests.get(self._step + 1):
            if not self._turns.has(manifest):
                return effects
            effects += await self._take_step(manifest, ctx)
        ctx.set_gauge("pool_groups", self._batcher.num_groups)
        ctx.set_gauge("pool_samples", len(self._turns))
        return [*effects, *self._propose()]

    def _propose(self) -> Effects:
        """Return a new manifest, only when all manifests up to the current step were read."""
        step = self._step + 1
        if step > self._config.steps_max or self._step_proposed >= step:
            return ()
        if self._batcher.last_step != self._step:
            return ()
        manifest = self._batcher.propose(step)
        if manifest is None:
            return ()
        self._step_proposed = step
        return (manifest,)

    async def _take_step(self, manifest: BatchManifest, ctx: Context) -> Effects:
        """Train, and turn an error in the data into one of the actor: steps cannot be left out."""
        try:
            return await self._train(manifest, ctx)
        except (ValueError, LookupError) as error:
            raise TrainingError(f"step {manifest.step}: {error}") from error

    async def _train(self, manifest: BatchManifest, ctx: Context) -> Effects:
        started = ctx.monotonic()
        wait_s = started - self._idle_since
        self._is_idle.clear()
        self._is_training.set()
        turns = self._turns.of(manifest)
        result = await ctx.offload(train_step, self._learner, manifest, turns, self._config)
        self._check_digest(manifest.step, result.weights_digest)
        self._step = manifest.step
        self._completed = StepCompleted(
            step=manifest.step,
            policy_version=manifest.step,
            weights_digest=result.weights_digest,
            optimizer_digest=result.optimizer_digest,
            metrics=result.metrics,
            staleness_tokens=result.staleness_tokens,
            train_s=ctx.monotonic() - started,
            wait_s=wait_s,
        )
        self._turns.drop(self._manifests.pop(manifest.step))
        effects: list[Event] = [self._completed, await self._publish(ctx)]
        if self._step % self._config.checkpoint_steps == 0 or self._is_finished:
            effects += await self._save(ctx)
            await drop_old_checkpoints(ctx.store, self._config.checkpoints_kept)
        self._set_idle(ctx)
        return [*effects, *self._finish()]

    def _check_digest(self, step: int, digest: str) -> None:
        """Compare what was trained here with what the log records, whichever comes first.

        Raises:
            NondeterminismError: They differ.

        """
        known = self._digests.setdefault(step, digest)
        if known != digest:
            raise NondeterminismError(
                f"step {step}: trained to weights {digest}, but the log or an earlier pass has "
                f"{known}; the same log must give the same bits (torch version? thread count?)"
            )

    async def _publish(self, ctx: Context) -> WeightsPublished:
        """Have the current version stored for the relays; return its manifest."""
        snapshot = await ctx.offload(_snapshot, self._learner.policy)
        ctx.set_gauge("policy_version", self._step)
        return await self._publisher.prepare(
            self._step,
            snapshot,
            optimizer_step=self._step,
            config_json=config_json(self._policy_config),
        )

    async def _save(self, ctx: Context) -> Effects:
        assert self._completed is not None
        rows = self._ledger.rows()
        return (await save_checkpoint(ctx, self._learner, self._completed, rows),)

    @property
    def _is_finished(self) -> bool:
        return self._step >= self._config.steps_max

    def _finish(self) -> Effects:
        return (RunFinished(reason="steps_max", step=self._step),) if self._is_finished else ()

    def _set_idle(self, ctx: Context) -> None:
        self._idle_since = ctx.monotonic()
        self._is_training.clear()
        self._is_idle.set()

    async def _watch(self, ctx: Context) -> None:
        """Show what the next step waits for, and fail when it does not come."""
        while True:
            await self._is_idle.wait()
            if self._is_finished:
                return
            async with ctx.waiting(
                "rollouts",
                f"step {self._step + 1}: {self._batcher.waits_for}",
                deadline_s=self._config.batch_wait_s_max,
                policy_version=self._step,
            ):
                await self._is_training.wait()


def _snapshot(policy: Policy) -> dict[str, np.ndarray]:
    return {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}
