"""The RL phase: takes the steps of stored manifests, in order, and publishes each version."""

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import config_json
from penstock.actors.policy.hf.stored import fetch_model, stored_model
from penstock.actors.policy.model import Policy
from penstock.actors.policy.snapshot import SnapshotPublisher
from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.actors.trainer.checkpoint import (
    drop_old_checkpoints,
    load_checkpoint,
    load_reference,
    newest_checkpoint,
    save_checkpoint,
)
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.phase import run_midtraining
from penstock.actors.trainer.midtraining.saves import drop_saves
from penstock.actors.trainer.off_policy import OffPolicy, measure
from penstock.actors.trainer.preferences.phase import run_preferences
from penstock.actors.trainer.preferences.reading import ExampleReader
from penstock.actors.trainer.preferences.waiting import left_out
from penstock.actors.trainer.step import train_step
from penstock.actors.trainer.turns import TurnStore
from penstock.messages.base import Event
from penstock.messages.control import RunFinished
from penstock.messages.errors import PenstockError
from penstock.messages.reading.ledger import Ledger
from penstock.messages.reading.sealed import Opener
from penstock.messages.rollout import Turn
from penstock.messages.training import (
    BatchManifest,
    CheckpointSaved,
    MidtrainCompleted,
    SampleEntry,
    StepCompleted,
)
from penstock.messages.weights import WeightsPublished

NUM_DIGESTS_MAX = 10_000
"""Steps whose weights are compared with what the log, or an earlier pass, has of them."""


class TrainingError(PenstockError, RuntimeError):
    """Training cannot continue from this log; the actor fails, rather than set the event aside."""


class NondeterminismError(TrainingError):
    """A step trained again gave other weights than the log records for it."""


class RlPhase:
    """The learner, the manifests that wait for it, and what each step made."""

    def __init__(
        self,
        config: TrainerConfig,
        policy_config: PolicyConfig,
        publisher: SnapshotPublisher,
        opener: Opener,
    ) -> None:
        self._config = config
        self._policy_config = policy_config
        self._opener = opener
        self._publisher = publisher
        self._manifests: dict[int, BatchManifest] = {}
        self._digests: dict[int, str] = {}
        self._completed: MidtrainCompleted | StepCompleted | None = None
        self._idle_since = 0.0
        self._step_last = config.steps_max
        self._reason = "steps_max"
        self._has_failed = False
        self.turns = TurnStore(config.turns_bytes_max, opener)
        self.ledger = Ledger()
        self.step = 0
        """= policy version of the learner."""
        self.is_idle = asyncio.Event()
        self.is_training = asyncio.Event()

    async def start(self, ctx: Context, seed: int) -> Effects:
        """Take up the newest checkpoint, or make version 0; return the facts of that version."""
        self._learner = Learner.initialized(self._policy_config, self._config.optimizer, seed)
        key = await newest_checkpoint(ctx.store)
        if key is None:
            await self._load_model(ctx)
            self._completed = await run_midtraining(ctx, self._learner, self._config, seed)
            if preferred := await run_preferences(ctx, self._learner, self._config, seed):
                digest = preferred.weights_digest
                self._completed = msgspec.structs.replace(self._completed, weights_digest=digest)
            saved: Effects = await self.save(ctx)
        else:
            head = await load_checkpoint(ctx.store, key, self._learner)
            self.step, self._completed = head.step, head.completed
            if isinstance(head.completed, StepCompleted):
                self._count_skipped(head.completed)
            saved = (
                CheckpointSaved(step=head.step, object_key=key, weights_digest=head.weights_digest),
            )
        await load_reference(ctx.store, self._learner)
        await drop_saves(ctx.store)
        self._set_idle(ctx)
        return [*saved, self._completed, await self._publish(ctx), *self._finish()]

    async def _load_model(self, ctx: Context) -> None:
        """Start from the run's model, if its store has one, instead of from random weights."""
        stored = await stored_model(ctx.store)
        if stored is None:
            return
        with tempfile.TemporaryDirectory(prefix="penstock-model-") as folder:
            await fetch_model(ctx.store, stored, Path(folder))
            await ctx.offload(self._learner.load_model, Path(folder))

    def add_manifest(self, manifest: BatchManifest) -> None:
        """Keep a manifest until its step is taken; one of an older step is done with."""
        self.ledger.add_manifest(manifest)
        if manifest.step > self.step:
            self._manifests[manifest.step] = manifest
        else:
            self.turns.drop(manifest)

    async def take_ready(self, ctx: Context) -> Effects:
        """Take every step whose manifest and turns are here.

        Raises:
            TrainingError: The data of a step are wrong; steps cannot be left out.

        """
        effects: list[Event] = []
        while (manifest := self._manifests.get(self.step + 1)) and self.turns.has(manifest):
            try:
                effects += await self._train(manifest, ctx)
            except (ValueError, LookupError) as error:
                raise TrainingError(f"step {manifest.step}: {error}") from error
        return effects

    async def measure(
        self, samples: Sequence[SampleEntry], turns: Mapping[str, Sequence[Turn]], ctx: Context
    ) -> dict[str, OffPolicy]:
        """Return how far the policy has moved from those that drew live samples."""
        return await ctx.offload(measure, self._learner, samples, turns, self._config)

    async def with_readable_preferences(
        self, manifest: BatchManifest, ctx: Context
    ) -> BatchManifest:
        """Return a proposed manifest without the corrections and judgments that nobody can read."""
        unreadable = await self._preferences(ctx).unreadable(manifest)
        entries = left_out(manifest.preferences, unreadable)
        return msgspec.structs.replace(manifest, preferences=entries)

    def _preferences(self, ctx: Context) -> ExampleReader:
        return ExampleReader(ctx.store, self._opener, ctx.last, self._policy_config)

    async def end_after(
        self, step: int, reason: str, ctx: Context, *, is_failure: bool = False
    ) -> Effects:
        """Let a step be the last, at the earliest the one just taken.

        Args:
            step: Which one.
            reason: Why, in words.
            ctx: Of the actor.
            is_failure: Whether the run cannot go on.

        """
        if self.is_finished or self._has_failed:
            return ()
        self._step_last, self._reason = max(step, self.step), reason
        self._has_failed = is_failure
        return [*await self.save(ctx), *self._finish()] if self.is_finished else ()

    @property
    def is_finished(self) -> bool:
        """Whether the last step is taken."""
        return self.step >= self._step_last

    async def _train(self, manifest: BatchManifest, ctx: Context) -> Effects:
        started = ctx.monotonic()
        wait_s = started - self._idle_since
        self.is_idle.clear()
        self.is_training.set()
        turns = await self.turns.load(manifest, ctx.store, ctx.last)
        config = self._config.of_step(manifest.settings)
        examples = await self._preferences(ctx).read(manifest)
        result = await ctx.offload(train_step, self._learner, manifest, turns, config, examples)
        if (left_s := self._config.step_s_min - (ctx.monotonic() - started)) > 0:
            await ctx.sleep(left_s)
        self.check_digest(manifest.step, result.weights_digest)
        self.step = manifest.step
        self._completed = StepCompleted(
            step=manifest.step,
            policy_version=manifest.step,
            weights_digest=result.weights_digest,
            optimizer_digest=result.optimizer_digest,
            metrics=result.metrics,
            staleness_tokens=result.staleness_tokens,
            train_s=ctx.monotonic() - started,
            wait_s=wait_s,
            skipped=result.skipped,
            num_skipped=self._num_skipped + 1 if result.skipped else 0,
            drift=result.drift,
        )
        self._count_skipped(self._completed)
        self.turns.drop(self._manifests.pop(manifest.step))
        effects: list[Event] = [self._completed, await self._publish(ctx)]
        if self.step % self._config.checkpoint_steps == 0 or self.is_finished:
            effects += await self.save(ctx)
            await drop_old_checkpoints(ctx.store, self._config.checkpoints_kept)
        self._set_idle(ctx)
        return [*effects, *self._finish()]

    @property
    def _num_skipped(self) -> int:
        """Steps skipped in a row, up to the current one."""
        done = self._completed
        return done.num_skipped if isinstance(done, StepCompleted) else 0

    def _count_skipped(self, done: StepCompleted) -> None:
        """Note a skipped step; too many in a row are the run's end."""
        self.ledger.add_step(done)
        if done.num_skipped >= self._config.skipped_steps_max:
            self._step_last, self._has_failed = done.step, True
            self._reason = f"{done.num_skipped} steps in a row were skipped: {done.skipped}"

    def check_digest(self, step: int, digest: str) -> None:
        """Compare what was trained here with what the log records, whichever comes first.

        Raises:
            NondeterminismError: They differ.

        """
        known = self._digests.setdefault(step, digest)
        while len(self._digests) > NUM_DIGESTS_MAX:
            del self._digests[next(iter(self._digests))]
        if known != digest:
            raise NondeterminismError(
                f"step {step}: trained to weights {digest}, but the log or an earlier pass has "
                f"{known}; the same log must give the same bits (torch version? thread count?)"
            )

    async def _publish(self, ctx: Context) -> WeightsPublished:
        """Have the current version stored for the relays; return its manifest."""
        snapshot = await ctx.offload(_snapshot, self._learner.policy)
        ctx.set_gauge("policy_version", self.step)
        return await self._publisher.prepare(
            self.step,
            snapshot,
            optimizer_step=self.step,
            config_json=config_json(self._policy_config),
        )

    async def save(self, ctx: Context) -> Effects:
        """Save a checkpoint of where training stands."""
        assert self._completed is not None
        rows = self.ledger.rows()
        return (await save_checkpoint(ctx, self._learner, self._completed, rows),)

    def _finish(self) -> Effects:
        if not self.is_finished:
            return ()
        return (RunFinished(reason=self._reason, step=self.step, is_failure=self._has_failed),)

    def _set_idle(self, ctx: Context) -> None:
        self._idle_since = ctx.monotonic()
        self.is_training.clear()
        self.is_idle.set()


def _snapshot(policy: Policy) -> dict[str, np.ndarray]:
    return {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}
