"""The gatekeeper: tests candidate versions and moves the channels that users are served from.

```
 no candidate ─▶ CandidateChosen ─▶ ChannelMoved(candidate), EvalAnnounced ×2
      quality bar and evaluation passed, a replica serves the version ─▶ ExperimentStarted
           all gates passed ─▶ ExperimentDecided(promoted) ─▶ ChannelMoved(stable)
           a gate rejects ─▶ ExperimentDecided(rolled_back): the gateways send everyone to stable
```
The actor decides on ticks, and only once it has caught up with the log, however long that takes.
"""

import contextlib
import logging
from collections.abc import Sequence
from typing import ClassVar

from penstock.actors.gatekeeper.config import GatekeeperConfig
from penstock.actors.gatekeeper.fold import GateFold, blocked_by
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.envs.tasks.storage import load_tasks
from penstock.messages.base import Event
from penstock.messages.errors import NotFoundError
from penstock.messages.feedback import InferenceRecorded, LiveSampleJoined
from penstock.messages.gates import (
    Arm,
    CandidateChosen,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
    ExperimentView,
    Gate,
    GateEvaluated,
    GateState,
)
from penstock.messages.generation import ChannelMoved, ReplicaReported
from penstock.messages.reward import EvalAnnounced, EvalCompleted, Verdict
from penstock.messages.task import Purpose, Split
from penstock.messages.training import BatchManifest, StepCompleted
from penstock.messages.weights import WeightsPublished

log = logging.getLogger(__name__)

REPORT_EVERY_S = 10.0
"""Shortest time between two reports of a candidate's state, in seconds."""


class Gatekeeper(Actor):
    """Chooses candidate versions, tests them, and promotes them or rolls them back."""

    role = "gatekeeper"
    can_skip = False
    tick_s = 1.0
    saved = ("_fold",)
    follows: ClassVar[tuple[type[Event], ...]] = (
        CandidateChosen,
        ExperimentStarted,
        ExperimentDecided,
        ChannelMoved,
        WeightsPublished,
        EvalAnnounced,
        EvalCompleted,
        Verdict,
        BatchManifest,
        StepCompleted,
        InferenceRecorded,
        LiveSampleJoined,
        ReplicaReported,
    )

    def __init__(self, config: GatekeeperConfig, judge: str) -> None:
        """Start with an empty state.

        Args:
            config: Gatekeeper settings.
            judge: Name of the judge whose verdicts count in evaluations.

        """
        self._config = config
        self._fold = GateFold(config, judge)
        self._replicas = ReplicaTable()
        self._num_tasks = 0
        self._first_stable = -1
        """Newest version at the start, which becomes `stable` if no channel was ever moved."""
        self._shown: ExperimentView | None = None
        self._shown_at = -REPORT_EVERY_S

    async def start(self, ctx: Context) -> Effects:
        """Count the held-out tasks and note the newest version."""
        if num_tasks := self._config.offline.num_tasks:
            # A run may have no held-out tasks; the offline gate then reports that as its failure.
            with contextlib.suppress(NotFoundError):
                self._num_tasks = min(num_tasks, len(await load_tasks(ctx.store, Split.HELDOUT)))
        if (last := await ctx.last(WeightsPublished)) is not None:
            self._first_stable = last.policy_version
        log.info("comparing versions on %d held-out tasks", self._num_tasks)
        return ()

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Update the table of replicas, which shows whether the candidate is served."""
        self._replicas.add(event, ctx.monotonic())
        return ()

    async def _take(self, event: Event, ctx: Context) -> Effects:
        """Apply an event to the state."""
        self._fold.apply(event)
        return ()

    on_candidate_chosen = on_experiment_started = on_experiment_decided = _take
    on_channel_moved = on_weights_published = _take
    on_eval_announced = on_eval_completed = on_verdict = _take
    on_batch_manifest = on_step_completed = _take
    on_inference_recorded = on_live_sample_joined = _take

    async def on_tick(self, ctx: Context) -> Effects:
        """Publish the next decision or move that follows from the log, and the current view."""
        self._replicas.expire(ctx.monotonic())
        # A decision from a partly read log could contradict one that is already on it.
        if not ctx.is_caught_up:
            return ()
        return [*self._next_effects(ctx), *self._changed_view(ctx)]

    def _next_effects(self, ctx: Context) -> Effects:
        """Return at most one decision or move; the next one waits until this one is on the log."""
        candidates = self._fold.candidates
        if Arm.STABLE not in candidates.channels:
            first = self._first_stable if self._first_stable >= 0 else candidates.newest
            return () if first < 0 else (self._move(Arm.STABLE, first, -1),)
        # A gatekeeper that was killed between the decision and the move makes the move now.
        if (promoted := candidates.promotion) is not None:
            return (self._move(Arm.STABLE, promoted.policy_version, promoted.number),)
        if not candidates.is_open:
            return self._choose(ctx)
        return self._advance(ctx)

    def _choose(self, ctx: Context) -> Effects:
        """Choose the newest version as the candidate, unless it is `stable` or already tested."""
        candidates = self._fold.candidates
        stable = candidates.channels[Arm.STABLE]
        last = candidates.chosen.policy_version if candidates.chosen else -1
        if candidates.newest <= max(stable, last):
            return ()
        chosen = CandidateChosen(
            number=candidates.next_number,
            policy_version=candidates.newest,
            stable_version=stable,
            at=ctx.now(),
        )
        log.info(
            "candidate %d: version %d against stable %d",
            chosen.number,
            chosen.policy_version,
            stable,
        )
        return (chosen,)

    def _advance(self, ctx: Context) -> Effects:
        """Take the open candidate's next step: move its channel, prepare it, or decide on it."""
        candidates = self._fold.candidates
        chosen, started = candidates.chosen, candidates.started
        assert chosen is not None, "there is no candidate"
        if candidates.is_overruled:
            return (self._decide(Decision.ABANDONED, "a channel was moved by hand", ctx),)
        if not candidates.is_moved(Arm.CANDIDATE, chosen.number):
            return (self._move(Arm.CANDIDATE, chosen.policy_version, chosen.number),)
        if started is None or started.number != chosen.number:
            return self._prepare(chosen, ctx)
        return self._judge(started, ctx)

    def _judge(self, started: ExperimentStarted, ctx: Context) -> Effects:
        """Promote, roll back or expire a candidate that users are served by, if that is due."""
        gates = self._fold.gates(self._num_tasks)
        if all(gate.state is GateState.PASSED for gate in gates):
            return (self._decide(Decision.PROMOTED, "every gate passed", ctx, gates),)
        if (reason := _rejected(gates)) is not None:
            return (self._decide(Decision.ROLLED_BACK, reason, ctx, gates),)
        # Without a bound, a candidate with too few users would block all later versions.
        if ctx.now() - started.at > self._config.hold_s_max:
            return (self._decide(Decision.EXPIRED, blocked_by(gates), ctx, gates),)
        return ()

    def _prepare(self, chosen: CandidateChosen, ctx: Context) -> Effects:
        """Announce evaluations of both versions; start the experiment once it may begin."""
        gates = self._fold.offline_gates(self._num_tasks)
        if (reason := _rejected(gates)) is not None:
            return (self._decide(Decision.ROLLED_BACK, reason, ctx, gates),)
        is_served = any(
            replica.policy_version == chosen.policy_version
            for replica in self._replicas.ready(Purpose.LIVE, Arm.CANDIDATE)
        )
        if all(gate.state is GateState.PASSED for gate in gates) and is_served:
            test = self._config.test
            started = ExperimentStarted(
                number=chosen.number,
                policy_version=chosen.policy_version,
                stable_version=chosen.stable_version,
                share=test.share,
                # A fresh salt per candidate draws the users of each arm again, independently.
                salt=f"{chosen.number}.{ctx.random.getrandbits(64):016x}",
                sticky_s=test.sticky_s,
                at=ctx.now(),
            )
            log.info(
                "experiment %d started: version %d for %g of users",
                chosen.number,
                chosen.policy_version,
                test.share,
            )
            return (started,)
        if ctx.now() - chosen.at > self._config.prepare_s_max:
            reason = blocked_by(gates) or "no replica of channel candidate serves the version"
            return (self._decide(Decision.EXPIRED, reason, ctx, gates),)
        versions = (chosen.stable_version, chosen.policy_version) if self._num_tasks else ()
        return [
            EvalAnnounced(
                eval_id=f"g{chosen.number}-v{version}",
                policy_version=version,
                num_tasks=self._num_tasks,
            )
            for version in versions
            if not self._fold.offline.is_announced(version, self._num_tasks)
        ]

    def _move(self, arm: Arm, policy_version: int, candidate_number: int) -> ChannelMoved:
        candidates = self._fold.candidates
        log.info("moving channel %s to version %d", arm.value, policy_version)
        return ChannelMoved(
            number=candidates.num_moves,
            channel=arm.value,
            policy_version=policy_version,
            channels={**candidates.channels, arm.value: policy_version},
            candidate_number=candidate_number,
        )

    def _decide(
        self, decision: Decision, reason: str, ctx: Context, gates: Sequence[Gate] = ()
    ) -> ExperimentDecided:
        chosen = self._fold.candidates.chosen
        assert chosen is not None, "there is no candidate"
        log.log(
            logging.INFO if decision is Decision.PROMOTED else logging.WARNING,
            "candidate %d, version %d: %s: %s",
            chosen.number,
            chosen.policy_version,
            decision.value,
            reason,
        )
        return ExperimentDecided(
            number=chosen.number,
            decision=decision,
            policy_version=chosen.policy_version,
            stable_version=chosen.stable_version,
            reason=reason,
            gates=list(gates),
            at=ctx.now(),
        )

    def _changed_view(self, ctx: Context) -> Effects:
        """Return the candidate's current state if it changed since the last report."""
        # The view changes with every reply of a user.
        if ctx.monotonic() - self._shown_at < REPORT_EVERY_S:
            return ()
        view = self._fold.view(self._num_tasks)
        if view is None or view == self._shown:
            return ()
        self._shown, self._shown_at = view, ctx.monotonic()
        return (GateEvaluated(view=view),)


def _rejected(gates: Sequence[Gate]) -> str | None:
    """Return the reason for a rollback, or None if no gate rejects the candidate."""
    found = [gate for gate in gates if gate.state is GateState.REJECTED]
    return f"{found[0].name}: {found[0].words}" if found else None
