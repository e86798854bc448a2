"""Checkpoints of a host's machines: save, restore, remove the oldest."""

import asyncio
import functools
import logging
import re
import shutil
from pathlib import Path
from typing import cast

from penstock.actors.runtime.context import Context
from penstock.envs.microvm.pool.lease import Lease
from penstock.envs.microvm.pool.pool import Pool
from penstock.envs.sandbox import (
    Capability,
    SandboxFileError,
    SandboxRequestError,
    SavingMachine,
    require,
)
from penstock.messages.episode import EpisodeSaved
from penstock.messages.sandbox import AcquireSandbox

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


class Checkpoints:
    """Checkpoints in one folder."""

    def __init__(self, pool: Pool, folder: Path, num_max: int, ctx: Context) -> None:
        self._ctx = ctx
        self._pool = pool
        self._folder = folder
        self._num_max = num_max
        self._saving = asyncio.Lock()

    async def clean(self) -> None:
        """Remove checkpoints without an event: a killed host left them partial or unreported."""
        names = await self._ctx.offload(self._names)
        for name in names:
            if not await self._is_named(name):
                log.info("checkpoint %s: removed, no event names it", name)
                remove = functools.partial(shutil.rmtree, ignore_errors=True)
                await self._ctx.offload(remove, self._folder / name)

    async def _is_named(self, checkpoint_id: str) -> bool:
        # Ids are `<rollout>-<number of turns>-...`; a rollout's id may contain such parts, too.
        for turns in re.finditer(r"-(\d+)(?=-)", checkpoint_id):
            key = f"{checkpoint_id[: turns.start()]}.{turns[1]}"
            saved = await self._ctx.last(EpisodeSaved, key)
            if saved is not None and saved.checkpoint_id == checkpoint_id:
                return True
        return False

    def _names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return [path.name for path in self._folder.iterdir()]

    async def save(self, lease_id: str, checkpoint_id: str) -> None:
        """Save a leased machine; an existing checkpoint is kept, which makes retries harmless.

        Raises:
            CapabilityMissing: The backend cannot save machines.
            NotFoundError: The lease does not exist.
            SandboxRequestError: The id is not a valid folder name.

        """
        require(self._pool.backend, [Capability.CHECKPOINT])
        folder = self._path(checkpoint_id)
        machine = cast(SavingMachine, self._pool.lease(lease_id).sandbox)
        # One at a time: each writes the memory of a machine, and trimming must not meet a write.
        async with self._saving:
            if not await self._ctx.offload(folder.exists):
                await machine.checkpoint(folder)
            await self._ctx.offload(self._trim)

    async def restore(self, request: AcquireSandbox, lease_s: float, reserved_slots: int) -> Lease:
        """Lease a machine that resumes from a checkpoint; raises what `Pool.restore` raises."""
        return await self._pool.restore(
            self._path(request.checkpoint_id),
            lease_s,
            lease_id=request.lease_id,
            image=request.image_digest,
            machine=request.machine,
            reserved_slots=reserved_slots,
        )

    def _path(self, checkpoint_id: str) -> Path:
        if NAME.fullmatch(checkpoint_id) is None:
            raise SandboxRequestError(f"checkpoint {checkpoint_id!r}: expected {NAME.pattern}")
        return self._folder / checkpoint_id

    def _trim(self) -> None:
        try:
            kept = sorted(self._folder.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        except OSError as error:
            raise SandboxFileError(f"{self._folder}: {error}") from error
        for path in kept[: -self._num_max]:
            shutil.rmtree(path, ignore_errors=True)
