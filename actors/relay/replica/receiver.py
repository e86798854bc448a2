"""The receiver of a replica, in the generator's process: keeps the engine at the required version.

```
 WeightsRelayed ─▶ fetch ─▶ decode ─▶ verify ─▶ stage ─▶ swap ─▶ probe ─▶ WeightsApplied
                  └──── generation continues ──────────┘   │        │
                                              pause_ms ◀───┘        └─ wrong: stage it whole, once
```
`HeldVersion` decides which of its region's versions a replica holds (pure):

```
 an evaluation is running, and this replica serves evaluations ─▶ the version of the evaluation
 channel version:7 ─▶ 7     stable ─▶ where the channel points     newest ─▶ the newest relayed
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
    """The version that one replica has to hold."""

    def __init__(self, channel: str = NEWEST, *, evaluates: bool = False) -> None:
        """Start without known versions.

        Args:
            channel: Channel to follow while no evaluation is running.
            evaluates: Whether the replica serves evaluations.

        Raises:
            ConfigError: The channel does not exist.

        """
        self._channel = channel
        self._pin = pinned_version(channel)
        self._evaluates = evaluates
        self.pins = Pins()
        self.newest = -1
        """Newest version relayed to the region."""

    @property
    def version(self) -> int | None:
        """Version to hold; None for the newest."""
        # The lowest first, in the order in which the evaluator runs its evaluations.
        if self._evaluates and self.pins.evaluations:
            return min(self.pins.evaluations.values())
        return self.pins.channels.get(self._channel) if self._pin is None else self._pin

    def relayed(self, policy_version: int) -> None:
        """Record that the region has a version."""
        self.newest = max(self.newest, policy_version)


log = logging.getLogger(__name__)
_STAGE_DEADLINE_S = 120.0
_SWAP_DEADLINE_S = 60.0
_NUM_LOADS_MAX = 8
"""Largest number of times that a joining replica catches up before it serves anyway."""


class QuarantinedError(PenstockError, RuntimeError):
    """The engine does not compute with the weights that were written to it, and must not serve."""


class UpdatableEngine(Protocol):
    """Interface of an inference engine whose weights a receiver updates."""

    async def begin_update(self) -> None:
        """Open an update next to the weights in use; drop an update that was never committed."""
        ...

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Stage whole tensors, or overwrites by flat index."""
        ...

    async def commit(
        self, policy_version: int, root_digest: str | None = None, probe: Sequence[float] = ()
    ) -> float:
        """Swap in the staged weights; return the pause of generation in milliseconds.

        Raises:
            CorruptDataError: The staged weights have another digest, and nothing changed; or the
                engine computes other values than `probe` with them, and no longer serves.

        """
        ...

    def probe(self) -> list[float]:
        """Return the values computed for the probe's prompts at the last commit."""
        ...

    async def digest(self) -> str:
        """Return the root digest of the weights in use."""
        ...


class Receiver(Actor):
    """Follows its region's relay to the newest version, or to the version of `target`.

    A replica that joins gets no requests before its weights are fresh enough: if it fell behind
    while it loaded, it catches up before it swaps anything in.
    """

    role: ClassVar[str] = "receiver"
    follows: ClassVar[tuple[type[Event], ...]] = (
        WeightsRelayed,
        EvalAnnounced,
        EvalCompleted,
        ChannelMoved,
    )

    def __init__(  # noqa: PLR0913 - identity, source, target and bounds
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
        """Initialize without reading anything.

        Args:
            region: Region whose relay to follow.
            replica: Name of the replica, unique in the run.
            local: Store of the region.
            engine: Engine to update.
            target: Version to hold; by default always the newest.
            staleness_max: Largest number of versions behind the head at which a replica may join.
            rates: Speeds of fetching and applying updates on this host.

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
        """Read the version to hold from the log."""
        # Before the first version is relayed; otherwise the replica would load the newest first.
        if moved := await ctx.last(ChannelMoved):
            self._target.pins.moved(moved)
        if announced := await ctx.last(EvalAnnounced):
            await self.on_eval_announced(announced, ctx)
        return ()

    async def on_weights_relayed(self, event: WeightsRelayed, ctx: Context) -> Effects:
        """Update the engine if the relayed version leads to the one it has to hold."""
        # The log has the announcements of all regions.
        if event.region != self._region:
            return ()
        self._target.relayed(event.policy_version)
        return await self._approach(ctx)

    async def on_eval_announced(self, event: EvalAnnounced, ctx: Context) -> Effects:
        """Hold the version of an evaluation, unless it is already complete."""
        # On a restart the announcement may be read again long after the evaluation.
        if await ctx.last(EvalCompleted, event.eval_id) is None:
            self._target.pins.announced(event)
        return await self._approach(ctx)

    async def on_eval_completed(self, event: EvalCompleted, ctx: Context) -> Effects:
        """Release the version of an evaluation and move on."""
        self._target.pins.completed(event.eval_id)
        return await self._approach(ctx)

    async def on_channel_moved(self, event: ChannelMoved, ctx: Context) -> Effects:
        """Follow a moved channel."""
        self._target.pins.moved(event)
        return await self._approach(ctx)

    async def _approach(self, ctx: Context) -> Effects:
        """Update the engine to the version it has to hold, if that differs and the region has it.

        Raises:
            QuarantinedError: The engine's digest is wrong even after a complete reload.
            DamagedStoreError: There is no undamaged update path to the version.
            DeadlineError: The store or the engine did not answer.

        """
        exact, newest = self._target.version, self._target.newest
        if newest < 0 or (newest <= self._version if exact is None else exact == self._version):
            return ()
        # The region does not have the version yet: wait at the present one until it is relayed.
        if exact is not None and exact > newest:
            return ()
        began = ctx.monotonic()
        reason = f"weights {newest if exact is None else exact}"
        async with ctx.waiting("store", reason, deadline_s=_STAGE_DEADLINE_S):
            try:
                num_read = await self._load(newest, exact, ctx)
            except NotFoundError as error:
                if exact is None:
                    raise
                # A pinned version may have been deleted. The present one can still be served.
                log.warning("staying at version %d instead of %d: %s", self._version, exact, error)
                return ()
        stage_ms = (ctx.monotonic() - began) * 1e3
        async with ctx.waiting("engine", reason, deadline_s=_SWAP_DEADLINE_S):
            pause_ms = await self._swap(ctx)
        applied = self._applied(ctx, num_bytes=num_read, stage_ms=stage_ms, pause_ms=pause_ms)
        log.info(
            "applied version %d after %d: %d bytes, staged in %.0f ms, paused for %.1f ms",
            self._weights.version,
            self._version,
            num_read,
            stage_ms,
            pause_ms,
        )
        self._version = self._weights.version
        self._weights.clear_changes()
        self._show_mismatches(ctx)
        return (applied,)

    async def _load(self, announced: int, exact: int | None, ctx: Context) -> int:
        """Move the copy of the weights to `exact` or to the newest; return the bytes fetched."""
        num_read, holder = 0, f"{self._region}-{self._replica}"
        if exact is not None:
            await self._catalog.refresh()
            held = self._weights.version
            # No update leads back: an older version starts from a full snapshot.
            path = self._catalog.plan(held if held <= exact else NOTHING, exact)
            async with leased_path(self._local, holder, path, ctx.now()):
                return await self._weights.advance(exact, ctx)
        # While a joining replica loads, the head moves on: repeat until it is near enough. One that
        # already serves swaps in what it has, and follows with the next event.
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
        """Return whether the weights are near enough to the head for a replica to join."""
        try:
            head = (await read_head(ctx.store)).policy_version
        except CorruptDataError as error:
            # Without a head, the region's newest version is the best that is known.
            log.warning("cannot check how fresh version %d is: %s", self._weights.version, error)
            return True
        return self._weights.version >= head - self._staleness_max

    async def _swap(self, ctx: Context) -> float:
        """Stage and commit the changes; after a wrong digest or probe, all tensors, once."""
        # If the engine's weights were damaged before, overwrites leave the damage in place; whole
        # tensors replace it.
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
        # Published here, as the effects of a handler that raises are dropped.
        await ctx.publish(wrong)
        what = "computes other values than the trainer" if digest_matches else "has a wrong digest"
        log.error("quarantined at version %d: the engine %s", self._weights.version, what)
        raise QuarantinedError(
            f"replica {self._region}/{self._replica}: the engine {what} at version"
            f" {self._weights.version}"
        )

    async def _commit(self, patches: Mapping[str, np.ndarray | Patch]) -> float | None:
        """Stage and commit patches; return the pause, or None if the engine's digest is wrong."""
        manifest = self._weights.manifest
        target = manifest.target_root_digest
        await self._engine.begin_update()
        await self._engine.apply(patches)
        try:
            pause_ms = await self._engine.commit(self._weights.version, target, manifest.probe)
        except CorruptDataError as error:
            log.warning("version %d was not swapped in: %s", self._weights.version, error)
            return None
        # The engine's own answer: what it holds now, and not what was staged, is decisive.
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
