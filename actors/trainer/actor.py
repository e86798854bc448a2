"""The trainer: mid-training, then one optimizer step per stored batch manifest.

```
events ──▶ Batcher ──propose──▶ BatchManifest ──▶ log ──▶ on_batch_manifest
                              (one per step wins)                │ all turns here?
                                                                 ▼
  StepCompleted, WeightsPublished, CheckpointSaved ◀── TrainingEngine.step
```
Only stored manifests are trained, in step order. A trainer killed at any point loads its newest
checkpoint, reads the log and repeats the same steps to the same bits; whatever it publishes a
second time is refused as a duplicate. Nothing is trained twice and nothing is lost.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import ClassVar

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.batching.batcher import Batcher
from penstock.actors.trainer.batching.manifests import trained_samples, with_num_inputs
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.distribution import outcome_of
from penstock.actors.trainer.engines.protocol import TrainingEngine
from penstock.actors.trainer.off_policy import OffPolicy, is_older, recorded
from penstock.actors.trainer.rl_phase import RlPhase
from penstock.actors.trainer.sequences import check_sample
from penstock.messages.base import Event
from penstock.messages.errors import CodecError
from penstock.messages.feedback import (
    ConsentWithdrawn,
    ErasurePrepared,
    ErasureRequested,
    FeedbackRetracted,
    LiveSampleJoined,
    UserErased,
)
from penstock.messages.reward import EvalCompleted, Outcome, Verdict
from penstock.messages.rollout import EpisodeEnd, RolloutFinished, Turn, TurnSampled
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.task import CreditsChanged, Purpose
from penstock.messages.training import BatchManifest, StepCompleted


class NewestEnds:
    """Decides whether a run should stop because machines or judges fail too often. Pure.

    Events of one rollout may come in any order; the rollout counts once. Only ended rollouts count:
    what a crash interrupts is resumed elsewhere and has not ended.

    Args:
        share_max: Largest tolerated share of failures, 0 to 1; 1 tolerates any.
        window: Number of newest rollouts considered.
        num_min: Number of rollouts below which no verdict is given.

    """

    def __init__(self, share_max: float, window: int, num_min: int) -> None:
        self._share_max, self._window, self._num_min = share_max, window, num_min
        self._failures: OrderedDict[str, str] = OrderedDict()
        """Cause of failure by rollout id, oldest first; empty for a rollout that did not fail."""

    def add_rollout(self, event: RolloutFinished) -> None:
        """Count a rollout's end, unless it was cancelled."""
        if event.end is not EpisodeEnd.CANCELLED:
            is_failure = event.end is EpisodeEnd.INFRASTRUCTURE_ERROR
            self._add(event.rollout_id, "machines" if is_failure else "")

    def add_verdict(self, event: Verdict) -> None:
        """Count a rollout that could not be judged as a failure.

        Judged rollouts count, too: after a restart, all verdicts may be read before any rollout's
        end.

        """
        if event.outcome is not Outcome.CANCELLED:
            is_failure = event.outcome in {Outcome.JUDGE_ERROR, Outcome.INFRASTRUCTURE_ERROR}
            self._add(event.rollout_id, "judges" if is_failure else "")

    @property
    def fault(self) -> str:
        """Why the run should stop; empty if it may continue."""
        failures = list(self._failures.values())
        num_machines, num_judges = failures.count("machines"), failures.count("judges")
        num = num_machines + num_judges
        if len(failures) < self._num_min or num <= self._share_max * len(failures):
            return ""
        return (
            f"infrastructure: of the newest {len(failures)} rollouts, {num_machines} ended because "
            f"machines failed, {num_judges} could not be judged; "
            f"trainer.infrastructure_share_max is {self._share_max:g}"
        )

    def _add(self, rollout_id: str, failure: str) -> None:
        if rollout_id in self._failures:
            # A verdict and an end may both report a failure; the first cause is kept.
            self._failures[rollout_id] = self._failures[rollout_id] or failure
            return
        self._failures[rollout_id] = failure
        while len(self._failures) > self._window:
            self._failures.popitem(last=False)


log = logging.getLogger(__name__)

SAVE_S_MAX = 20.0
"""Maximum time for a checkpoint at a stop; what is not saved is recomputed from the log."""


class Trainer(Actor):
    """Owns the weights. If a run has several trainers, the log's order makes them act as one."""

    role = "trainer"
    can_skip = False
    tick_s = 1.0
    saved = ("_batcher", "_phase", "_ends", "_step_proposed", "_erasures", "_waiting_since")
    follows: ClassVar[tuple[type[Event], ...]] = (
        TurnSampled,
        RolloutFinished,
        Verdict,
        LiveSampleJoined,
        PreferencePair,
        Label,
        ErasureRequested,
        UserErased,
        FeedbackRetracted,
        ConsentWithdrawn,
        CreditsChanged,
        BatchManifest,
        StepCompleted,
        EvalCompleted,
    )

    def __init__(
        self,
        config: TrainerConfig,
        policy_config: PolicyConfig,
        engine: TrainingEngine,
        seed: int,
        opener: Vault,
    ) -> None:
        self._config = config
        self._policy_config = policy_config
        self._seed = seed
        self._batcher = Batcher(config)
        self._phase = RlPhase(config, policy_config, engine, opener)
        self._ends = NewestEnds(
            config.infrastructure_share_max,
            config.infrastructure_window,
            config.infrastructure_num_min,
        )
        self._step_proposed = 0
        self._erasures: list[ErasureRequested] = []
        """Erasures for which a checkpoint has yet to be saved."""
        self._waiting_since: float | None = None
        """Unix seconds at which the oldest live sample arrived that no manifest has taken."""

    def mark(self) -> int:
        """Return the step of the weights: what a later step settled, it may have to train again."""
        return self._phase.step

    def can_save(self) -> bool:
        """Return whether the weights have a checkpoint: a start would find no older ones."""
        return self._phase.step == self._phase.step_saved

    def restored(self) -> None:
        """Settle what was trained after the snapshot."""
        self._phase.restored()

    async def start(self, ctx: Context) -> Effects:
        """Load the newest checkpoint, or create version 0."""
        effects = await self._phase.start(ctx, self._seed)
        ctx.spawn("watch", self._watch(ctx))
        return effects

    async def stop(self, ctx: Context) -> Effects:
        """Save a checkpoint within `SAVE_S_MAX`; ranks may stop at the same time and be gone."""
        try:
            async with asyncio.timeout(SAVE_S_MAX):
                return await self._phase.save(ctx)
        except TimeoutError:
            log.warning(
                "no checkpoint within %g s of the stop; the next start replays the log", SAVE_S_MAX
            )
            return ()

    async def on_turn_sampled(self, event: TurnSampled, ctx: Context) -> Effects:
        """Note that a group is running."""
        self._phase.ledger.add_turn(event)
        self._phase.turns.add_turn(event)
        self._batcher.add_turn(event)
        return ()

    async def on_rollout_finished(self, event: RolloutFinished, ctx: Context) -> Effects:
        """Keep the names of the rollout's turns."""
        self._ends.add_rollout(event)
        if event.purpose is Purpose.TRAIN:
            self._phase.turns.add(event.rollout_id, event)
            self._batcher.add_rollout(event, self._isolation_fault(event))
        return await self._advance(ctx)

    async def on_verdict(self, event: Verdict, ctx: Context) -> Effects:
        """Add a rollout's reward."""
        self._ends.add_verdict(event)
        self._batcher.add_verdict(event)
        return await self._advance(ctx)

    async def on_live_sample_joined(self, event: LiveSampleJoined, ctx: Context) -> Effects:
        """Add a user's sample to the next batch."""
        self._phase.ledger.add_live(event)
        self._phase.turns.add(event.sample_id, event)
        self._batcher.add_live(event)
        # A revision of a settled sample adds nothing to wait for, so `num_live` decides.
        if self._waiting_since is None and self._batcher.num_live:
            self._waiting_since = ctx.stored_at
        return await self._advance(ctx)

    async def on_preference_pair(self, event: PreferencePair, ctx: Context) -> Effects:
        """Add a correction to the next batch."""
        return await self._prefer(event, ctx)

    async def on_label(self, event: Label, ctx: Context) -> Effects:
        """Add a judgment to the next batch."""
        return await self._prefer(event, ctx)

    async def _prefer(self, event: PreferencePair | Label, ctx: Context) -> Effects:
        self._phase.ledger.preferences.add(event)
        if not self._batcher.preferences.is_on:
            # Preferences are counted in the ledger but change no batch while they are off.
            return ()
        self._batcher.preferences.add(event)
        if self._waiting_since is None and len(self._batcher.preferences):
            self._waiting_since = ctx.stored_at
        return await self._advance(ctx)

    async def on_feedback_retracted(self, event: FeedbackRetracted, ctx: Context) -> Effects:
        """Drop a sample that has not been trained."""
        self._batcher.retract(event)
        return ()

    async def on_consent_withdrawn(self, event: ConsentWithdrawn, ctx: Context) -> Effects:
        """Drop what has not been trained of a key that may not be trained any more."""
        self._batcher.withdraw(event)
        return await self._advance(ctx)

    async def on_erasure_requested(self, event: ErasureRequested, ctx: Context) -> Effects:
        """Stop using a user's content, except in steps whose manifests are already stored."""
        self._batcher.erase(event.tenant, event.user)
        self._erasures.append(event)
        return await self._advance(ctx)

    async def on_user_erased(self, event: UserErased, ctx: Context) -> Effects:
        """Forget the user's key; a user who returns gets a new one."""
        self._phase.turns.erase(event.tenant, event.user)
        self._batcher.readmit(event.tenant, event.user)
        return ()

    async def on_credits_changed(self, event: CreditsChanged, ctx: Context) -> Effects:
        """Update how many groups may still arrive."""
        self._batcher.add_credits(event)
        return await self._advance(ctx)

    async def on_batch_manifest(self, event: BatchManifest, ctx: Context) -> Effects:
        """Account for the manifest's samples, and train it if it is next."""
        self._batcher.commit(event)
        self._waiting_since = ctx.stored_at if self._batcher.num_live else None
        self._phase.add_manifest(event)
        return await self._advance(ctx)

    async def on_step_completed(self, event: StepCompleted, ctx: Context) -> Effects:
        """Record the digest that the step must reproduce, and whether it was skipped."""
        self._phase.check_digest(event.step, event.weights_digest, event.arithmetic)
        self._phase.ledger.add_step(event)
        return ()

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """End the run early once the policy is good enough; a proposed batch is still trained."""
        target = self._config.pass_rate_stop if event.is_main else 0.0
        is_trained_version = event.policy_version > 0 and event.num_tasks > 0
        if not target or not is_trained_version or event.num_solved < target * event.num_tasks:
            return ()
        return await self._phase.end_after(self._step_proposed, "pass_rate", ctx)

    async def on_tick(self, ctx: Context) -> Effects:
        """Propose a batch when an epoch is due or a step has waited long enough."""
        is_time = self._is_due(ctx) or self._batcher.patience.is_over(ctx.monotonic())
        return await self._propose(ctx) if is_time else ()

    def _is_due(self, ctx: Context) -> bool:
        epoch, since = self._config.epoch, self._waiting_since
        return epoch is not None and since is not None and ctx.now() >= since + epoch.s_max

    def _isolation_fault(self, event: RolloutFinished) -> str:
        """Return why a rollout's sandbox isolates too little; empty if it suffices."""
        allowed = self._config.isolation_classes
        if event.sandbox is None or event.sandbox.isolation_class in allowed:
            return ""
        fault = f"isolation class {event.sandbox.isolation_class}, expected {', '.join(allowed)}"
        log.warning("rollout %s is not trained: %s", event.rollout_id, fault)
        return fault

    async def _checked(
        self, manifest: BatchManifest, measured: dict[str, OffPolicy], ctx: Context
    ) -> tuple[BatchManifest, dict[str, Outcome]]:
        """Measure a proposed batch, and find samples that cannot be trained.

        Args:
            manifest: Proposed manifest.
            measured: Staleness measurements of older live samples by id; missing ones are
                added.
            ctx: Context of the actor.

        Returns:
            The manifest with sequence lengths and measurements, and the outcome of each
            unusable sample.

        """
        samples = trained_samples(manifest)
        loaded = await self._phase.turns.try_load(samples, ctx.store, ctx.last)
        found: dict[str, Outcome] = {}
        readable: dict[str, Sequence[Turn]] = {}
        lengths: dict[str, list[int]] = {}
        for sample in samples:
            name, turns = sample.rollout_id, loaded[sample.rollout_id]
            try:
                if isinstance(turns, CodecError):
                    raise turns
                lengths[name] = check_sample(sample, turns, self._policy_config)
                readable[name] = turns
            except ValueError as error:
                log.warning("sample %s is not trained: %s", name, error)
                found[name] = outcome_of(error)
        manifest = with_num_inputs(manifest, lengths)
        older = [
            sample
            for sample in manifest.live
            if sample.rollout_id in readable and is_older(sample, manifest.policy_version)
        ]
        new = [sample for sample in older if sample.rollout_id not in measured]
        if new:
            measured |= await self._phase.measure(new, readable, ctx)
        for sample in older:
            if measured[sample.rollout_id].is_stale(self._config.live):
                found[sample.rollout_id] = Outcome.STALE
        return recorded(manifest, measured), found

    async def _advance(self, ctx: Context) -> Effects:
        """Take every step that the log has ready, then propose the next batch if there is one."""
        effects = await self._phase.take_ready(ctx)
        if fault := self._ends.fault:
            given_up = await self._phase.end_after(self._step_proposed, fault, ctx, is_failure=True)
            effects = [*effects, *given_up]
        ctx.set_gauge("pending_groups", self._batcher.num_groups)
        ctx.set_gauge("pending_samples", len(self._phase.turns))
        effects = [*effects, *await self._prepare_erasures(ctx)]
        return [*effects, *await self._propose(ctx)]

    async def _prepare_erasures(self, ctx: Context) -> Effects:
        """Save a checkpoint past every step that needs an erased user's turns, then announce it."""
        # A manifest that is proposed or stored may still need the turns, and a stored one must be
        # trained exactly. So erasure waits until proposals, manifests and steps agree.
        is_settled = self._step_proposed <= self._phase.step == self._batcher.last_step
        if not self._erasures or not is_settled:
            return ()
        effects = [*await self._phase.save(ctx)]
        # In this order: once the checkpoint is stored, no restart reads the erased turns again.
        for one in self._erasures:
            self._phase.turns.erase(one.tenant, one.user)
            effects.append(ErasurePrepared(tenant=one.tenant, user=one.user, key_id=one.key_id))
        self._erasures.clear()
        return effects

    async def _propose(self, ctx: Context) -> Effects:
        """Return a new manifest if every manifest up to the current step has been read.

        Turns are read and checked here and not on arrival: after a restart, most of the log is
        already
        settled. Live samples of older versions are measured here, too.

        """
        step = self._phase.step + 1
        is_over = self._phase.is_finished or self._step_proposed >= step
        if is_over or self._batcher.last_step != self._phase.step:
            return ()
        measured: dict[str, OffPolicy] = {}
        # Bounded: each round removes at least one sample from the candidates.
        while True:
            manifest = self._batcher.propose(step, is_due=self._is_due(ctx), now=ctx.monotonic())
            if manifest is None:
                return ()
            manifest, left_out = await self._checked(manifest, measured, ctx)
            if not left_out:
                break
            self._batcher.leave_out(left_out)
        # Set before the publish, which may be repeated: the log accepts one manifest per step.
        self._step_proposed = step
        return (await self._phase.with_readable_preferences(manifest, ctx),)

    async def _watch(self, ctx: Context) -> None:
        """Show what the next step waits for, and fail if it never comes."""
        while True:
            await self._phase.is_idle.wait()
            if self._phase.is_finished:
                return
            async with ctx.waiting(
                "rollouts",
                f"step {self._phase.step + 1}: {self._batcher.waits_for}",
                deadline_s=self._config.batch_wait_s_max,
                policy_version=self._phase.step,
            ):
                await self._phase.is_training.wait()
