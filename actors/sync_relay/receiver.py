"""One a replica, in the generator's process: brings its engine to the newest version.

```
 WeightsRelayed ─▶ fetch ─▶ decode ─▶ verify ─▶ stage ─▶ swap ─▶ verify ─▶ WeightsApplied
                  └──── generation goes on ────────────┘   │        │
                                              pause_ms ◀───┘        └─ wrong: stage it whole, once
```
"""

import logging
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np

from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.actors.sync_relay.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.image import Image
from penstock.actors.sync_relay.loading import Loaded, Loader
from penstock.kernels.delta import Patch
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, PenstockError
from penstock.messages.weights import WeightsApplied, WeightsRelayed

_log = logging.getLogger(__name__)
_STAGE_DEADLINE_S = 120.0
_SWAP_DEADLINE_S = 60.0


class QuarantinedError(PenstockError, RuntimeError):
    """The engine does not hold the weights that were written to it; it must not serve."""


class UpdatableEngine(Protocol):
    """What a receiver needs of an inference engine."""

    async def begin_update(self) -> None:
        """Open an update beside the weights in use, dropping one that was never committed."""
        ...

    async def apply(self, patches: Mapping[str, np.ndarray | Patch]) -> None:
        """Stage whole tensors, or overwrites by flat index."""
        ...

    async def commit(self, policy_version: int, root_digest: str | None = None) -> float:
        """Swap in what is staged; return the milliseconds that generation stood still.

        Raises:
            CorruptDataError: the staged weights' digest is another; nothing changed.

        """
        ...

    async def digest(self) -> str:
        """Return the root digest of the weights in use."""
        ...


class Receiver(Actor):
    """Follows its region's relay; skips what is older than the newest version it hears of."""

    role: ClassVar[str] = "receiver"
    follows: ClassVar[tuple[type[Event], ...]] = (WeightsRelayed,)

    def __init__(
        self, region: str, replica: str, local: ObjectStore, engine: UpdatableEngine
    ) -> None:
        self._region = region
        self._replica = replica
        self._engine = engine
        self._catalog = Catalog(local)
        self._loader = Loader(local, self._catalog)
        self._image: Image | None = None
        self._version = NOTHING
        self._num_mismatches = 0

    async def on_weights_relayed(self, event: WeightsRelayed, ctx: Context) -> Effects:
        """Bring the engine to the newest version that the region holds.

        Raises:
            QuarantinedError: the engine's digest is wrong even after a whole reload.
            DamagedStoreError: no undamaged way to the version.
            DeadlineError: the store or the engine did not answer.

        """
        if event.region != self._region or event.policy_version <= self._version:
            return ()
        began = ctx.monotonic()
        reason = f"weights {event.policy_version}"
        async with ctx.waiting("store", reason, deadline_s=_STAGE_DEADLINE_S):
            loaded = await self._load(event.policy_version, ctx)
        self._count_mismatches(loaded.num_mismatches, ctx)
        stage_ms = (ctx.monotonic() - began) * 1e3
        async with ctx.waiting("engine", reason, deadline_s=_SWAP_DEADLINE_S):
            pause_ms = await self._swap(loaded, ctx)
        applied = self._applied(loaded, stage_ms=stage_ms, pause_ms=pause_ms)
        self._image, self._version = loaded.image, loaded.manifest.policy_version
        return (applied,)

    async def _load(self, announced: int, ctx: Context) -> Loaded:
        await self._catalog.refresh()
        way = self._catalog.plan(self._version)
        newest = way[-1].policy_version if way else NOTHING
        return await self._loader.load(self._image, self._version, max(newest, announced), ctx)

    async def _swap(self, loaded: Loaded, ctx: Context) -> float:
        """Stage and commit; a wrong digest is answered by staging every tensor whole."""
        whole: Mapping[str, np.ndarray | Patch] = loaded.image.tensors
        patches = whole
        if self._image is not None:
            patches = await ctx.offload(loaded.image.changes_since, self._image)
        for attempt in (patches, whole):
            if (pause_ms := await self._commit(attempt, loaded)) is not None:
                return pause_ms
            self._count_mismatches(1, ctx)
        await ctx.publish(self._applied(loaded, digest_matches=False))
        raise QuarantinedError(
            f"replica {self._region}/{self._replica}: the engine's digest at version"
            f" {loaded.manifest.policy_version} is not {loaded.manifest.target_root_digest}"
        )

    async def _commit(
        self, patches: Mapping[str, np.ndarray | Patch], loaded: Loaded
    ) -> float | None:
        """Return the pause, or None where the engine came out with another digest."""
        target = loaded.manifest.target_root_digest
        await self._engine.begin_update()
        await self._engine.apply(patches)
        try:
            pause_ms = await self._engine.commit(loaded.manifest.policy_version, target)
        except CorruptDataError as error:
            _log.warning("replica %s/%s: %s", self._region, self._replica, error)
            return None
        return pause_ms if await self._engine.digest() == target else None

    def _count_mismatches(self, num_mismatches: int, ctx: Context) -> None:
        self._num_mismatches += num_mismatches
        ctx.set_gauge("digest_mismatches", self._num_mismatches)

    def _applied(
        self,
        loaded: Loaded,
        *,
        digest_matches: bool = True,
        stage_ms: float = 0.0,
        pause_ms: float = 0.0,
    ) -> WeightsApplied:
        return WeightsApplied(
            region=self._region,
            replica=self._replica,
            policy_version=loaded.manifest.policy_version,
            root_digest=loaded.manifest.target_root_digest,
            digest_matches=digest_matches,
            from_version=self._version,
            num_bytes=loaded.num_bytes,
            stage_ms=stage_ms,
            pause_ms=pause_ms,
        )
