"""Replay: recomputes a run's training from its log and compares every digest.

It recomputes rewards from the components of verdicts, advantages and the live baseline from
rewards, and repeats every optimizer step from the checkpoint of version 0. `counterfactual/`
repeats the steps with other settings or rewards.
"""

import asyncio
import math
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from typing import ClassVar, NamedTuple, ParamSpec, TypeVar

import msgspec

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.batching.audit import ManifestAudit
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.checkpoint import first_checkpoint, next_checkpoint
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.engines.protocol import StepData, TrainingEngine
from penstock.actors.trainer.machine import arithmetic
from penstock.actors.trainer.preferences.reading import ExampleReader
from penstock.actors.trainer.ranks.world import World
from penstock.actors.trainer.step import StepResult
from penstock.actors.trainer.turns import TurnStore
from penstock.messages.base import Event
from penstock.messages.bus import Delivery, ObjectStore
from penstock.messages.errors import ErasedError, NotFoundError
from penstock.messages.feedback import LiveSampleJoined
from penstock.messages.reading.trajectories import Last
from penstock.messages.reward import Verdict
from penstock.messages.rollout import RolloutFinished, TurnSampled
from penstock.messages.signals.preferences import Label, PreferencePair
from penstock.messages.training import (
    ArithmeticChanged,
    BatchManifest,
    MidtrainCompleted,
    StepCompleted,
)

P = ParamSpec("P")
R = TypeVar("R")
REPLAY_TYPES: tuple[type[Event], ...] = (
    MidtrainCompleted,
    TurnSampled,
    RolloutFinished,
    Verdict,
    LiveSampleJoined,
    PreferencePair,
    Label,
    ArithmeticChanged,
    BatchManifest,
    StepCompleted,
)
"""Event types that replay needs."""


class ReplaySpan(msgspec.Struct, kw_only=True):
    """Steps in a row that one arithmetic computed."""

    first: int
    last: int
    arithmetic: str
    """As in `StepCompleted`; empty: not recorded."""
    is_repeated: bool
    """Bit for bit; otherwise their losses are within the tolerance, if they do not differ."""


class ReplayReport(msgspec.Struct, kw_only=True):
    """Result of a replay."""

    steps: int = 0
    """Repeated steps."""
    steps_compared: int = 0
    """Steps whose digests are in the log."""
    steps_erased: int = 0
    """Steps that cannot be repeated because a user whom they trained was erased; replay continues
    from the next checkpoint."""
    identical: bool = False
    """Whether everything compared is equal, and something was compared."""
    first_difference: str = ""
    spans: list[ReplaySpan] = []
    """Steps in a row that were computed alike, and how far they are repeated."""
    wall_s: float = 0.0
    """Wall-clock seconds of the replay, including reading the log."""
    live_midtrain_s: float = 0.0
    """Wall-clock seconds of the run's mid-training."""
    live_rl_s: float = 0.0
    """Wall-clock seconds of the run's recorded steps, waiting included, stops excluded."""
    losses: list[float] = []
    weights_digest: str = ""
    """Digest of the last version's weights."""
    ended: str = ""
    """Reason why a what-if ended before the log did, or empty."""

    @property
    def live_s(self) -> float:
        """Wall-clock seconds of the run's mid-training and RL."""
        return self.live_midtrain_s + self.live_rl_s

    @property
    def speedup(self) -> float:
        """Speedup of the replay over mid-training and RL together."""
        return self.live_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def speedup_rl(self) -> float:
        """Speedup of the replay over RL, whose steps it repeats."""
        return self.live_rl_s / self.wall_s if self.wall_s > 0 else 0.0


TOLERANCE = 1e-3
"""Relative difference of a loss at which two machines still computed the same step: rounding moves
it by less than a thousandth of this, another batch by far more."""


class ReplayLog(msgspec.Struct, frozen=True, kw_only=True):
    """A run's log and objects."""

    deliveries: AsyncIterator[Delivery]
    """Events, at least those of `REPLAY_TYPES`, each stream in order."""
    last: Last
    """Reader of single events, for turns that are not in memory."""
    store: ObjectStore
    """Objects of the run: the checkpoint of version 0, and turns."""
    opener: Vault
    """Opener of users' sealed turns."""

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in a thread."""
        return await asyncio.to_thread(function, *args, **kwargs)


class ReplayStart(NamedTuple):
    """Starting point of a replay."""

    engine: TrainingEngine
    """Engine at the version of `weights_digest`."""
    policy_config: PolicyConfig
    config: TrainerConfig
    weights_digest: str


OnStep = Callable[[BatchManifest, StepResult], None]


class Replay:
    """Processes the deliveries of a log, in order, into a report."""

    compares: ClassVar[bool] = True
    """Whether each step should equal the recorded one."""

    def __init__(self, start: ReplayStart, log: ReplayLog, *, on_step: OnStep | None) -> None:
        self._engine, self._config = start.engine, start.config
        self._log = log
        self._on_step = on_step
        self._turns = TurnStore(start.config.turns_bytes_max, log.opener)
        self._preferences = ExampleReader(log.store, log.opener, log.last, start.policy_config)
        self._audit = ManifestAudit(start.config)
        self._manifests: list[BatchManifest] = []
        self._results: dict[int, StepResult] = {}
        self._recorded: dict[int, StepCompleted] = {}
        self._taken = 0
        """Newest step that was taken."""
        self._is_off = False
        """Whether the weights differ from the run's, as another machine rounded them."""
        self._resumed_at = 0
        """Step of the checkpoint from which replay continued; earlier steps are skipped."""
        self.report = ReplayReport(weights_digest=start.weights_digest)

    async def add(self, delivery: Delivery) -> None:
        """Process one event of the log."""
        match delivery.event:
            case MidtrainCompleted() as event:
                self.report.live_midtrain_s = event.wall_s
                self._compare(
                    "version 0: weights", self.report.weights_digest, event.weights_digest
                )
            case TurnSampled() as event:
                self._turns.add_turn(event)
            case RolloutFinished() as event:
                self._turns.add(event.rollout_id, event)
                self._audit.add_rollout(event)
            case LiveSampleJoined() as event:
                self._turns.add(event.sample_id, event)
                self._audit.add_live(event)
            case PreferencePair() | Label() as event:
                self._audit.preferences.add(event)
            case Verdict() as event:
                self._audit.add_verdict(event)
            case BatchManifest() as event:
                self._manifests.append(event)
            case ArithmeticChanged() as event:
                await self._go_over(event)
            case StepCompleted() as event:
                self._recorded[event.step] = event
                self.report.live_rl_s += event.wait_s + event.train_s
            case _:
                pass
        await self._advance()

    async def read(self) -> None:
        """Process the log to its end, or until a what-if ends."""
        async for delivery in self._log.deliveries:
            await self.add(delivery)
            if self.report.ended:
                return

    def finish(self) -> ReplayReport:
        """Return the final report; manifests that are left are differences."""
        if self.report.ended:
            return self.report
        for manifest in self._manifests:
            self._differ(f"step {manifest.step}: the log lacks turns of its rollouts")
        not_taken = set(self._recorded) - set(self._results)
        for step in sorted(step for step in not_taken if step > self._resumed_at):
            self._differ(f"step {step}: recorded, but the log lacks its manifest")
        is_whole = all(span.is_repeated for span in self.report.spans)
        is_equal = self.report.steps_compared > 0 and not self.report.first_difference
        self.report.identical = is_equal and is_whole
        return self.report

    async def _advance(self) -> None:
        # Streams have no common order: a manifest may come before the turns that it names.
        while self._manifests and not self.report.ended:
            first = self._manifests[0]
            if not (self._turns.has(first) and self._audit.preferences.has(first)):
                break
            await self._train(self._manifests.pop(0))
        for step in [step for step in self._recorded if step in self._results]:
            self._compare_step(self._recorded.pop(step), self._results.pop(step))

    async def _train(self, manifest: BatchManifest) -> None:
        config = self._config.of_step(manifest.settings)
        for difference in self._audit.differences(manifest):
            self._differ(difference)
        # The checkpoint after the erased step already contains these steps.
        if manifest.step <= self._resumed_at:
            return self._leave_out(manifest)
        try:
            samples = trained_samples(manifest)
            turns = await self._turns.load(samples, self._log.store, self._log.last)
            data = StepData(turns, await self._preferences.read(manifest))
        except ErasedError as error:
            await self._resume_after(manifest, error)
            return self._leave_out(manifest)
        result = await self.take(manifest, config, data)
        self._turns.drop(manifest)
        if self.report.ended:
            return
        self._results[manifest.step] = result
        self._taken = manifest.step
        self.report.steps += 1
        self.report.losses.append(result.metrics["loss"])
        self.report.weights_digest = result.weights_digest
        if self._on_step is not None:
            self._on_step(manifest, result)

    async def take(
        self, manifest: BatchManifest, config: TrainerConfig, data: StepData
    ) -> StepResult:
        """Take a step; an override sets `report.ended` if the step does not count."""

        async def read() -> StepData:
            return data

        return await self._engine.step(self._log, manifest, config, read)

    def _leave_out(self, manifest: BatchManifest) -> None:
        self._turns.drop(manifest)
        self.report.steps_erased += 1

    async def _resume_after(self, manifest: BatchManifest, error: ErasedError) -> None:
        """Continue from the next checkpoint, because a user of this step was erased."""
        key = await next_checkpoint(self._log.store, manifest.step)
        if key is None:
            self._resumed_at = sys.maxsize
            return self._differ(f"step {manifest.step}: {error}, and no checkpoint follows")
        position = await self._engine.load(self._log, key)
        self._resumed_at = position.step
        self.report.weights_digest = position.saved.weights_digest

    def _compare_step(self, recorded: StepCompleted, result: StepResult) -> None:
        if not self.compares:
            return
        name = f"step {recorded.step}"
        self.report.steps_compared += 1
        is_alike = recorded.arithmetic in {"", arithmetic()}
        self._is_off = self._is_off or not is_alike
        if self._is_off and result.weights_digest != recorded.weights_digest:
            self._note(recorded, is_repeated=False)
            loss, found = recorded.metrics.get("loss", math.nan), result.metrics["loss"]
            if not math.isclose(found, loss, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                self._compare(f"{name}: loss, by {recorded.arithmetic}", found, loss)
            return
        self._is_off = False
        self._note(recorded, is_repeated=True)
        self._compare(f"{name}: weights", result.weights_digest, recorded.weights_digest)
        self._compare(f"{name}: optimizer", result.optimizer_digest, recorded.optimizer_digest)
        self._compare(f"{name}: skipped", result.skipped, recorded.skipped)
        # NaN equals nothing: a log without the loss counts as different.
        loss = recorded.metrics.get("loss", math.nan)
        self._compare(f"{name}: loss", result.metrics["loss"], loss)

    def _note(self, recorded: StepCompleted, *, is_repeated: bool) -> None:
        """Record how far a step is repeated: bit for bit, or within the tolerance."""
        spans, last = self.report.spans, self.report.spans[-1] if self.report.spans else None
        is_same = last is not None and last.arithmetic == recorded.arithmetic
        if last is not None and is_same and last.is_repeated == is_repeated:
            last.last = recorded.step
            return
        spans.append(
            ReplaySpan(
                first=recorded.step,
                last=recorded.step,
                arithmetic=recorded.arithmetic,
                is_repeated=is_repeated,
            )
        )

    async def _go_over(self, event: ArithmeticChanged) -> None:
        """Go on from the checkpoint at which the run went over to this process's arithmetic."""
        if event.now != arithmetic() or not self._is_off:
            return
        # A checkpoint before steps that were taken already would need them taken again.
        is_there = await next_checkpoint(self._log.store, event.step) == event.checkpoint
        if is_there and event.step == self._taken:
            self._is_off = False
            position = await self._engine.load(self._log, event.checkpoint)
            self.report.weights_digest = position.saved.weights_digest

    def _compare(self, name: str, found: object, recorded: object) -> None:
        if found != recorded and self.compares:
            self._differ(f"{name}: {found}, the log has {recorded}")

    def _differ(self, difference: str) -> None:
        self.report.first_difference = self.report.first_difference or difference


async def replay(
    log: ReplayLog,
    policy_config: PolicyConfig,
    config: TrainerConfig,
    *,
    on_step: OnStep | None = None,
    world: World | None = None,
) -> ReplayReport:
    """Repeat a run's training and compare it with the log.

    Args:
        world: Ranks that replay together, each of which reads the whole log; None for one process.

    Raises:
        NotFoundError: The store has no checkpoint of step 0.
        CorruptDataError: The checkpoint is damaged.
        CodecError: A trained turn does not match the log.

    """
    started = time.perf_counter()
    engine = LocalEngine(policy_config, config, world=world)
    run = Replay(await first_version(log, engine, policy_config, config), log, on_step=on_step)
    await run.read()
    report = run.finish()
    report.wall_s = time.perf_counter() - started
    return report


async def first_version(
    log: ReplayLog, engine: TrainingEngine, policy_config: PolicyConfig, config: TrainerConfig
) -> ReplayStart:
    """Load version 0 into an engine, with settings for all cores; raises what `replay` raises."""
    key = await first_checkpoint(log.store)
    if key is None:
        raise NotFoundError("checkpoints/00000000-*: the run has no checkpoint of version 0")
    position = await engine.load(log, key)
    return ReplayStart(engine, policy_config, on_all_cores(config), position.saved.weights_digest)


def on_all_cores(config: TrainerConfig) -> TrainerConfig:
    """Return settings with one worker per core, as nothing else runs."""
    # On a GPU, memory limits the number of workers.
    if config.device != "cpu":
        return config
    return msgspec.structs.replace(config, num_workers=os.cpu_count() or 1)
