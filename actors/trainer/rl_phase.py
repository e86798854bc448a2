"""The RL phase: takes the steps of stored manifests in order and publishes each version."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.runtime.actor import Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.checkpoint import drop_old_checkpoints, load_newest
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.protocol import Completed, StepData, TrainingEngine
from penstock.actors.trainer.machine import arithmetic
from penstock.actors.trainer.midtraining.saves import drop_saves
from penstock.actors.trainer.objective.losses import loss_spec
from penstock.actors.trainer.off_policy import OffPolicy
from penstock.actors.trainer.preferences.reading import ExampleReader
from penstock.actors.trainer.preferences.waiting import left_out
from penstock.actors.trainer.turns import TurnStore
from penstock.messages.base import Event
from penstock.messages.control import RunFinished
from penstock.messages.errors import PenstockError
from penstock.messages.reading.ledger import Ledger
from penstock.messages.rollout import Turn
from penstock.messages.training import (
    ArithmeticChanged,
    BatchManifest,
    CheckpointSaved,
    SampleEntry,
    StepCompleted,
)
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)

NUM_DIGESTS_MAX = 10_000
"""Steps whose weight digests are kept for comparison with the log or an earlier pass."""


class TrainingError(PenstockError, RuntimeError):
    """Training cannot continue from this log. Fails the actor instead of skipping the event."""


class NondeterminismError(TrainingError):
    """A repeated step produced weights other than those the log records."""


class RlPhase:
    """Drives the training engine through stored manifests, and keeps the digest of each step."""

    saved = ("_manifests", "_digests", "_arithmetics", "turns", "ledger")

    def __init__(
        self,
        config: TrainerConfig,
        policy_config: PolicyConfig,
        engine: TrainingEngine,
        opener: Vault,
    ) -> None:
        loss_spec(config.loss)  # Own code that is no loss ends the run here, not at its first step.
        self._config = config
        self._policy_config = policy_config
        self._opener = opener
        self._engine = engine
        self._manifests: dict[int, BatchManifest] = {}
        self._digests: dict[int, str] = {}
        self._arithmetics: dict[int, str] = {}
        """What computed the steps of these digests, where that is known."""
        self._loaded: CheckpointSaved | None = None
        """The checkpoint that this process began with."""
        self._is_declared = False
        """Whether the log knows that this process computes otherwise than the one before."""
        self._completed: Completed | None = None
        self._idle_since = 0.0
        self._step_last = config.steps_max
        self._reason = "steps_max"
        self._has_failed = False
        self.turns = TurnStore(config.turns_bytes_max, opener)
        self.ledger = Ledger()
        self.step = 0
        """Step of the engine's weights, which is their policy version."""
        self.step_saved = -1
        """Step of the newest checkpoint."""
        self.is_idle = asyncio.Event()
        self.is_training = asyncio.Event()

    async def start(self, ctx: Context, seed: int) -> Effects:
        """Load the newest sound checkpoint or create version 0; return that version's events."""
        position = await load_newest(ctx.store, partial(self._engine.load, ctx))
        if position is None:
            position = await self._engine.make_version_0(ctx, seed)
        self.step, self._completed = position.step, position.completed
        self.step_saved, self._loaded = position.step, position.saved
        if isinstance(position.completed, StepCompleted):
            self._count_skipped(position.completed)
        # Version 0 has a checkpoint by now, so no start will need a save of mid-training.
        await drop_saves(ctx.store)
        self._set_idle(ctx)
        completed = self._completed
        before = completed.arithmetic if isinstance(completed, StepCompleted) else ""
        declared = self._declare(before) if before not in {"", arithmetic()} else ()
        return [position.saved, completed, await self._publish(ctx), *declared, *self._finish()]

    def _declare(self, before: str) -> Effects:
        """Say on the log, once, that steps are computed otherwise from the checkpoint on."""
        if self._is_declared or self._loaded is None:
            return ()
        self._is_declared = True
        log.warning(
            "steps after %d are computed by %s, earlier ones by %s: a replay repeats the bits of "
            "either only where it computes alike",
            *(self._loaded.step, arithmetic(), before),
        )
        return (
            ArithmeticChanged(
                step=self._loaded.step,
                checkpoint=self._loaded.object_key,
                before=before,
                now=arithmetic(),
            ),
        )

    def restored(self) -> None:
        """Settle the manifests of a snapshot that are trained by now."""
        for step in sorted(self._manifests):
            if step <= self.step:
                self.turns.drop(self._manifests.pop(step))

    def add_manifest(self, manifest: BatchManifest) -> None:
        """Keep a manifest until its step is taken; drop the turns of a step already taken."""
        self.ledger.add_manifest(manifest)
        if manifest.step > self.step:
            self._manifests[manifest.step] = manifest
        else:
            self.turns.drop(manifest)

    async def take_ready(self, ctx: Context) -> Effects:
        """Take every step whose manifest and turns have arrived.

        Raises:
            TrainingError: The data of a step are wrong. A step cannot be left out.

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
        """Measure how far the policy has moved from the versions that sampled live samples."""
        return await self._engine.measure(ctx, samples, turns, self._config)

    async def with_readable_preferences(
        self, manifest: BatchManifest, ctx: Context
    ) -> BatchManifest:
        """Return a proposed manifest without corrections and judgments that cannot be read."""
        unreadable = await self._preferences(ctx).unreadable(manifest)
        entries = left_out(manifest.preferences, unreadable)
        return msgspec.structs.replace(manifest, preferences=entries)

    def _preferences(self, ctx: Context) -> ExampleReader:
        return ExampleReader(ctx.store, self._opener, ctx.last, self._policy_config)

    async def end_after(
        self, step: int, reason: str, ctx: Context, *, is_failure: bool = False
    ) -> Effects:
        """Make a step the last one, at the earliest the one just taken.

        Args:
            step: Last step.
            reason: Reason, recorded in `RunFinished`.
            ctx: Context of the actor.
            is_failure: Whether the run failed.

        """
        if self.is_finished or self._has_failed:
            return ()
        self._step_last, self._reason = max(step, self.step), reason
        self._has_failed = is_failure
        return [*await self.save(ctx), *self._finish()] if self.is_finished else ()

    @property
    def is_finished(self) -> bool:
        """Whether the last step has been taken."""
        return self.step >= self._step_last

    async def _train(self, manifest: BatchManifest, ctx: Context) -> Effects:
        started = ctx.monotonic()
        wait_s = started - self._idle_since
        self.is_idle.clear()
        self.is_training.set()
        config = self._config.of_step(manifest.settings)

        async def read() -> StepData:
            turns = await self.turns.load(trained_samples(manifest), ctx.store, ctx.last)
            return StepData(turns, await self._preferences(ctx).read(manifest))

        result = await self._engine.step(ctx, manifest, config, read)
        # Measurements emulate the longer step of a larger model.
        if (left_s := self._config.step_s_min - (ctx.monotonic() - started)) > 0:
            await ctx.sleep(left_s)
        # Before any event is published: a divergent step must not reach the log.
        before = self.check_digest(manifest.step, result.weights_digest, arithmetic())
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
            arithmetic=arithmetic(),
        )
        self._count_skipped(self._completed)
        # Only now: if the step had failed, its turns would be needed again.
        self.turns.drop(self._manifests.pop(manifest.step))
        effects: list[Event] = [self._completed]
        if before:
            # The version is out, with weights that another machine rounded: it stays as it is, and
            # the next one is a change of it.
            effects += self._declare(before)
        else:
            effects.append(await self._publish(ctx))
        # A checkpoint follows the publish of its version, so no checkpoint names weights that
        # relays lack.
        if self.step % self._config.checkpoint_steps == 0 or self.is_finished:
            effects += await self.save(ctx)
            await drop_old_checkpoints(ctx.store, self._config.checkpoints_kept)
        self._set_idle(ctx)
        log.info(
            "step %d: version %d, %s, trained %.1f s after waiting %.1f s",
            self.step,
            self.step,
            f"skipped: {result.skipped}"
            if result.skipped
            else f"digest {result.weights_digest[:12]}",
            self._completed.train_s,
            wait_s,
        )
        return [*effects, *self._finish()]

    @property
    def _num_skipped(self) -> int:
        """Consecutive skipped steps up to the current one."""
        done = self._completed
        return done.num_skipped if isinstance(done, StepCompleted) else 0

    def _count_skipped(self, done: StepCompleted) -> None:
        """Count a skipped step; too many in a row end the run."""
        self.ledger.add_step(done)
        if done.num_skipped >= self._config.skipped_steps_max:
            self._step_last, self._has_failed = done.step, True
            self._reason = f"{done.num_skipped} steps in a row were skipped: {done.skipped}"

    def check_digest(self, step: int, digest: str, computed_by: str) -> str:
        """Compare a step's digest with the one the log recorded, whichever is known first.

        Args:
            step: The step.
            digest: Of its weights.
            computed_by: Arithmetic of the step; empty if it was not recorded.

        Returns:
            The other arithmetic that gave other bits; empty if the bits are the same.

        Raises:
            NondeterminismError: They differ, although both were computed alike.

        """
        known = self._digests.setdefault(step, digest)
        other = self._arithmetics.setdefault(step, computed_by)
        while len(self._digests) > NUM_DIGESTS_MAX:
            oldest = next(iter(self._digests))
            del self._digests[oldest]
            self._arithmetics.pop(oldest, None)
        if known == digest:
            return ""
        if other and computed_by and other != computed_by:
            return other
        raise NondeterminismError(
            f"step {step}: trained to weights {digest} by {computed_by or 'what is not recorded'}, "
            f"but the log or an earlier pass has {known} by {other or 'what is not recorded'}: the "
            "same log and the same arithmetic must give the same bits"
        )

    async def _publish(self, ctx: Context) -> WeightsPublished:
        """Store the current version for the relays; return its manifest event."""
        ctx.set_gauge("policy_version", self.step)
        return await self._engine.publish(ctx, self.step)

    async def save(self, ctx: Context) -> Effects:
        """Save a checkpoint of the current state."""
        assert self._completed is not None
        saved = await self._engine.save(ctx, self._completed, self.ledger.rows())
        self.step_saved = saved.step
        return (saved,)

    def _finish(self) -> Effects:
        if not self.is_finished:
            return ()
        return (RunFinished(reason=self._reason, step=self.step, is_failure=self._has_failed),)

    def _set_idle(self, ctx: Context) -> None:
        self._idle_since = ctx.monotonic()
        self.is_training.clear()
        self.is_idle.set()
