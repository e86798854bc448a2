"""One per replica, in the generator's process: keeps its engine at the version it is to hold.

```
 WeightsRelayed ─▶ fetch ─▶ decode ─▶ verify ─▶ stage ─▶ swap ─▶ probe ─▶ WeightsApplied
                  └──── generation continues ──────────┘   │        │
                                              pause_ms ◀───┘        └─ wrong: stage it whole, once
```

Which version a replica is to hold, of those that its region has. Pure.

```
 an evaluation is announced, and this replica serves them ─▶ its version, until it is over
 version:7 ─▶ 7     stable ─▶ where the channel points     newest ─▶ the newest relayed
```
"""

import logging
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

import msgspec
import numpy as np

from penstock.actors.relay.core.catalog import NOTHING, Catalog, Rates
from penstock.actors.relay.core.leases import leased_path
from penstock.actors.relay.core.pins import Pins
from penstock.actors.relay.core.version_head import read_head
from penstock.actors.relay.replica.weight_replica import WeightReplica
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.kernels.delta import Patch
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError, PenstockError
from penstock.messages.generation import NEWEST, ChannelMoved, pinned_version
from penstock.messages.reward import EvalAnnounced, EvalCompleted
from penstock.messages.weights import WeightsApplied, WeightsRelayed


class HeldVersion:
    """One replica's choice."""

    def __init__(self, channel: str = NEWEST, *, evaluates: bool = False) -> None:
        """Know of nothing.

        Args:
            channel: Followed where no evaluation is under way.
            evaluates: Whether the replica serves evaluations.

        Raises:
            ConfigError: No such channel.

        """
        self._channel = channel
        self._pin = pinned_version(channel)
        self._evaluates = evaluates
        self.pins = Pins()
        self.newest = -1
        """The newest version relayed to the region."""

    @property
    def version(self) -> int | None:
        """The one version to hold; None to hold the newest."""
        if self._evaluates and self.pins.evaluations:
            return min(self.pins.evaluations.values())
        return self.pins.channels.get(self._channel) if self._pin is None else self._pin

    def relayed(self, policy_version: int) -> None:
        """Take note that the region has a version."""
        self.newest = max(self.newest, policy_version)


_log = logging.getLogger(__name__)
_STAGE_DEADLINE_S = 120.0
_SWAP_DEADLINE_S = 60.0
_NUM_LOADS_MAX = 8


class QuarantinedError(PenstockError, RuntimeError):
    """The engine does not hold the weights that were written to it; it must not serve."""


class UpdatableEngine(Protocol):
    """An inference engine as its receiver sees it."""

    async def begin_update(self) -> None:
        """Open an update beside the weights in use, dropping one that was never committed."""
        ...

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Stage whole tensors, or overwrites by flat index."""
        ...

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """Swap in what is staged; return the milliseconds that generation stood still.

        Raises:
            CorruptDataError: The staged weights have another digest, and nothing changed; or the
                engine does not compute `probe` with them, and serves nothing any more.

        """
        ...

    def probe(self) -> list[float]:
        """Return what it computed for the probe's prompts at the last commit."""
        ...

    async def digest(self) -> str:
        """Return the root digest of the weights in use."""
        ...


class Receiver(Actor):
    """Follows its region's relay, to the newest version it announced or to the one of `target`.

    An engine without weights serves no requests, and gets none before they are fresh enough: a
    joiner that became late while it loaded catches up before it swaps anything in.
    """

    role: ClassVar[str] = "receiver"
    follows: ClassVar[tuple[type[Event], ...]] = (
        WeightsRelayed,
        EvalAnnounced,
        EvalCompleted,
        ChannelMoved,
    )

    def __init__(  # noqa: PLR0913 - its identity, source, target and bounds
        self,
        region: str,
        replica: str,
        local: ObjectStore,
        engine: UpdatableEngine,
        *,
        target: HeldVersion | None = None,
        staleness_max: int = 0,
        rates: Rates = Rates(),  # noqa: B008
    ) -> None:
        """Prepare.

        Args:
            region: Region whose relay it follows.
            replica: Name of the replica, unique in the run.
            local: The region's store.
            engine: The engine to update.
            target: Which version it holds; by default always the newest.
            staleness_max: Versions behind the head that a replica may join at.
            rates: Speed of fetching and of applying here.

        """
        self._region = region
        self._replica = replica
        self._local = local
        self._engine = engine
        self._target = target or HeldVersion()
        self._staleness_max = staleness_max
        self._catalog = Catalog(local, rates)
        self._weights = WeightReplica(local, self._catalog, region)
        self._version = NOTHING
        self._num_mismatches = 0

    async def start(self, ctx: Context) -> Effects:
        """Know the version to hold before the first one comes."""
        if moved := await ctx.last(ChannelMoved):
            self._target.pins.moved(moved)
        if announced := await ctx.last(EvalAnnounced):
            await self.on_eval_announced(announced, ctx)
        return ()

    async def on_weights_relayed(self, event: WeightsRelayed, ctx: Context) -> Effects:
        """Update the engine, if this is the version it is to hold."""
        if event.region != self._region:
            return ()
        self._target.relayed(event.policy_version)
        return await self._approach(ctx)

    async def on_eval_announced(self, event: EvalAnnounced, ctx: Context) -> Effects:
        """Hold the version of an evaluation that is not over yet."""
        if await ctx.last(EvalCompleted, event.eval_id) is None:
            self._target.pins.announced(event)
        return await self._approach(ctx)

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Go on from the version of an evaluation."""
        self._target.pins.completed(event.eval_id)
        return await self._approach(ctx)

    async def on_channel_moved(self, event: ChannelMoved, ctx: Context) -> Effects:
        """Follow the channel."""
        self._target.pins.moved(event)
        return await self._approach(ctx)

    async def _approach(self, ctx: Context) -> Effects:
        """Update the engine to the version it is to hold, if the region has it and it is another.

        Raises:
            QuarantinedError: The engine's digest is wrong even after a whole reload.
            DamagedStoreError: No undamaged update path to the version.
            DeadlineError: The store or the engine did not answer.

        """
        exact, newest = self._target.version, self._target.newest
        if newest < 0 or (newest <= self._version if exact is None else exact == self._version):
            return ()
        if exact is not None and exact > newest:  # Stop at it on the way there.
            return ()
        began = ctx.monotonic()
        reason = f"weights {newest if exact is None else exact}"
        async with ctx.waiting("store", reason, deadline_s=_STAGE_DEADLINE_S):
            try:
                num_read = await self._load(newest, exact, ctx)
            except NotFoundError as error:
                if exact is None:
                    raise
                _log.warning("replica %s stays at %d: %s", self._replica, self._version, error)
                return ()
        stage_ms = (ctx.monotonic() - began) * 1e3
        async with ctx.waiting("engine", reason, deadline_s=_SWAP_DEADLINE_S):
            pause_ms = await self._swap(ctx)
        applied = self._applied(ctx, num_bytes=num_read, stage_ms=stage_ms, pause_ms=pause_ms)
        self._version = self._weights.version
        self._weights.clear_changes()
        self._show_mismatches(ctx)
        return (applied,)

    async def _load(self, announced: int, exact: int | None, ctx: Context) -> int:
        """Move the copy to a version or the newest; return the bytes of the objects fetched."""
        num_read, holder = 0, f"{self._region}-{self._replica}"
        if exact is not None:
            await self._catalog.refresh()
            held = self._weights.version
            path = self._catalog.plan(held if held <= exact else NOTHING, exact)
            async with leased_path(self._local, holder, path, ctx.now()):
                return await self._weights.advance(exact, ctx)
        for _ in range(_NUM_LOADS_MAX):
            await self._catalog.refresh()
            path = self._catalog.plan(self._weights.version)
            target = max(announced, path[-1].policy_version if path else NOTHING)
            async with leased_path(self._local, holder, path, ctx.now()):
                num_read += await self._weights.advance(max(target, self._weights.version), ctx)
            if self._version > NOTHING or await self._is_fresh(ctx):
                break
        return num_read

    async def _is_fresh(self, ctx: Context) -> bool:
        """Check whether a joiner is near enough to the head."""
        try:
            head = (await read_head(ctx.store)).policy_version
        except CorruptDataError:  # the region's newest must do
            return True
        return self._weights.version >= head - self._staleness_max

    async def _swap(self, ctx: Context) -> float:
        """Stage and commit; after a wrong digest or probe, stage every tensor whole, once."""
        for attempt in (self._weights.patches, lambda: self._weights.snapshot.tensors):
            patches = await ctx.offload(attempt)
            if (pause_ms := await self._commit(patches)) is not None:
                return pause_ms
            self._num_mismatches += 1
        self._show_mismatches(ctx)
        digest_matches = await self._engine.digest() == self._weights.manifest.target_root_digest
        wrong = msgspec.structs.replace(
            self._applied(ctx), digest_matches=digest_matches, probe_matches=not digest_matches
        )
        await ctx.publish(wrong)
        what = "computes other values than the trainer" if digest_matches else "has another digest"
        raise QuarantinedError(
            f"replica {self._region}/{self._replica}: the engine {what} at version"
            f" {self._weights.version}"
        )

    async def _commit(self, patches: Mapping[str, np.ndarray | Patch]) -> float | None:
        """Return the pause, or None if the engine ended with another digest."""
        manifest = self._weights.manifest
        target = manifest.target_root_digest
        await self._engine.begin_update()
        await self._engine.apply(patches)
        try:
            pause_ms = await self._engine.commit(self._weights.version, target, manifest.probe)
        except CorruptDataError as error:
            _log.warning("replica %s/%s: %s", self._region, self._replica, error)
            return None
        return pause_ms if await self._engine.digest() == target else None

    def _show_mismatches(self, ctx: Context) -> None:
        num_mismatches = self._num_mismatches + self._weights.num_mismatches
        ctx.set_gauge("digest_mismatches", num_mismatches)

    def _applied(
        self,
        ctx: Context,
        *,
        num_bytes: int = 0,
        stage_ms: float = 0.0,
        pause_ms: float = 0.0,
    ) -> WeightsApplied:
        return WeightsApplied(
            region=self._region,
            replica=self._replica,
            policy_version=self._weights.version,
            root_digest=self._weights.manifest.target_root_digest,
            digest_matches=True,
            from_version=self._version,
            num_bytes=num_bytes,
            stage_ms=stage_ms,
            pause_ms=pause_ms,
            applied_at=ctx.now(),
            probe=self._engine.probe(),
        )
