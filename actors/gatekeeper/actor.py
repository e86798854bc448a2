"""The gatekeeper: moves channels as the gates say.

```
 no candidate ─▶ CandidateChosen ─▶ ChannelMoved(candidate), EvalAnnounced ×2
      quality bar and evaluation passed, a replica serves it ─▶ ExperimentStarted
           all gates passed ─▶ ExperimentDecided(promoted) ─▶ ChannelMoved(stable)
           a gate rejects ─▶ ExperimentDecided(rolled_back): the gateways send everyone to stable
```
Decisions are made between events, and only once the log has been read up to where it stood when
this process started.
"""

import contextlib
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

SHOWN_EVERY_S = 10.0
CATCH_UP_S_MAX = 600.0
"""Longest wait for events that the log had at the start; one may be unreadable."""


class Gatekeeper(Actor):
    """Chooses candidates, tests them, promotes them or not."""

    role = "gatekeeper"
    can_skip = False
    tick_s = 1.0
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
        """Start with nothing known.

        Args:
            config: Gates and bounds.
            judge: Whose verdicts count in evaluations.

        """
        self._config = config
        self._fold = GateFold(config, judge)
        self._replicas = ReplicaTable()
        self._num_tasks = 0
        self._unread: dict[type[Event], str] = {}
        """Newest events of the log at the start, which are still to be read."""
        self._first_stable = -1
        """Where `stable` points first, if nobody moved it: what was newest at the start."""
        self._give_up_at = 0.0
        self._shown: ExperimentView | None = None
        self._shown_at = -SHOWN_EVERY_S

    async def start(self, ctx: Context) -> Effects:
        """Count the held-out tasks, and see how far the log is."""
        if num_tasks := self._config.offline.num_tasks:
            with contextlib.suppress(NotFoundError):  # The gate then says that there are none.
                self._num_tasks = min(num_tasks, len(await load_tasks(ctx.store, Split.HELDOUT)))
        for kind in self._fold.types:
            if (last := await ctx.last(kind)) is not None:
                self._unread[kind] = last.key()
                if isinstance(last, WeightsPublished):
                    self._first_stable = last.policy_version
        self._give_up_at = ctx.monotonic() + CATCH_UP_S_MAX
        return ()

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Know who serves the candidate."""
        self._replicas.add(event, ctx.monotonic())
        return ()

    async def _take(self, event: Event, ctx: Context) -> Effects:
        """Fold an event."""
        self._fold.apply(event)
        if self._unread.get(type(event)) == event.key():
            del self._unread[type(event)]
        return ()

    on_candidate_chosen = on_experiment_started = on_experiment_decided = _take
    on_channel_moved = on_weights_published = _take
    on_eval_announced = on_eval_completed = on_verdict = _take
    on_batch_manifest = on_step_completed = _take
    on_inference_recorded = on_live_sample_joined = _take

    async def on_tick(self, ctx: Context) -> Effects:
        """Do what follows from the log, one thing after the other."""
        self._replicas.expire(ctx.monotonic())
        if self._unread and ctx.monotonic() < self._give_up_at:
            return ()
        return [*self._due(ctx), *self._shown_now(ctx)]

    def _due(self, ctx: Context) -> Effects:
        candidates = self._fold.candidates
        if Arm.STABLE not in candidates.channels:
            first = self._first_stable if self._first_stable >= 0 else candidates.newest
            return () if first < 0 else (self._move(Arm.STABLE, first, -1),)
        if (promoted := candidates.promotion) is not None:
            return (self._move(Arm.STABLE, promoted.policy_version, promoted.number),)
        if not candidates.is_open:
            return self._choose(ctx)
        return self._advance(ctx)

    def _choose(self, ctx: Context) -> Effects:
        """Take the newest version as the candidate, if it is newer than all that were decided."""
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
        return (chosen,)

    def _advance(self, ctx: Context) -> Effects:
        """Bring the open candidate one step further."""
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
        """Decide on a candidate that users know, if it is time."""
        gates = self._fold.gates(self._num_tasks)
        if all(gate.state is GateState.PASSED for gate in gates):
            return (self._decide(Decision.PROMOTED, "every gate passed", ctx, gates),)
        if (reason := _rejected(gates)) is not None:
            return (self._decide(Decision.ROLLED_BACK, reason, ctx, gates),)
        if ctx.now() - started.at > self._config.hold_s_max:
            return (self._decide(Decision.EXPIRED, blocked_by(gates), ctx, gates),)
        return ()

    def _prepare(self, chosen: CandidateChosen, ctx: Context) -> Effects:
        """Have both versions evaluated, then start the experiment where a replica serves it."""
        gates = self._fold.offline_gates(self._num_tasks)
        if (reason := _rejected(gates)) is not None:
            return (self._decide(Decision.ROLLED_BACK, reason, ctx, gates),)
        is_served = any(
            one.policy_version == chosen.policy_version
            for one in self._replicas.ready(Purpose.LIVE, Arm.CANDIDATE)
        )
        if all(gate.state is GateState.PASSED for gate in gates) and is_served:
            test = self._config.test
            started = ExperimentStarted(
                number=chosen.number,
                policy_version=chosen.policy_version,
                stable_version=chosen.stable_version,
                share=test.share,
                salt=f"{chosen.number}.{ctx.random.getrandbits(64):016x}",
                sticky_s=test.sticky_s,
                at=ctx.now(),
            )
            return (started,)
        if ctx.now() - chosen.at > self._config.prepare_s_max:
            reason = blocked_by(gates) or "no replica of the channel candidate serves it"
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
        return ExperimentDecided(
            number=chosen.number,
            decision=decision,
            policy_version=chosen.policy_version,
            stable_version=chosen.stable_version,
            reason=reason,
            gates=list(gates),
            at=ctx.now(),
        )

    def _shown_now(self, ctx: Context) -> Effects:
        """Report where the candidate stands, if that changed."""
        if ctx.monotonic() - self._shown_at < SHOWN_EVERY_S:
            return ()
        view = self._fold.view(self._num_tasks)
        if view is None or view == self._shown:
            return ()
        self._shown, self._shown_at = view, ctx.monotonic()
        return (GateEvaluated(view=view),)


def _rejected(gates: Sequence[Gate]) -> str | None:
    """Return why a candidate is rolled back; None where nothing demands it."""
    found = [gate for gate in gates if gate.state is GateState.REJECTED]
    return f"{found[0].name}: {found[0].words}" if found else None
