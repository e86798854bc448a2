"""One machine under Firecracker."""

import asyncio
import shutil
import time
from pathlib import Path

from penstock.envs.microvm.checkpoint import MEMORY, STATE, MachineCheckpoint, save_manifest
from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.firecracker.api import FirecrackerApi
from penstock.envs.microvm.host_process import HostProcess
from penstock.envs.microvm.machine import GuestSandbox
from penstock.envs.microvm.protocol import GuestIdentity, LineState
from penstock.envs.sandbox import SandboxFileError
from penstock.messages.rollout import SandboxRecord

SAVE_DEADLINE_S = 60.0


class FirecrackerMachine(GuestSandbox):
    """A `SavingMachine` in a jail of its own."""

    def __init__(
        self,
        connection: GuestConnection,
        process: HostProcess,
        info: SandboxRecord,
        jail: Path,
        machine_digest: str,
    ) -> None:
        super().__init__(connection, process, info)
        self._jail = jail
        self._api = FirecrackerApi(jail / "root" / "api.sock", SAVE_DEADLINE_S)
        self._machine_digest = machine_digest
        self._saving = asyncio.Lock()

    async def checkpoint(self, folder: Path) -> None:
        """See `SavingMachine.checkpoint`."""
        try:
            await asyncio.to_thread(folder.mkdir, parents=True, mode=0o700)
        except FileExistsError:
            raise SandboxFileError(f"checkpoint {folder}: exists already") from None
        async with self._saving:
            started = time.perf_counter()
            line = await self._connection.freeze(timeout_s=self.hang_grace_s)
            try:
                await self._api.patch("/vm", state="Paused")
                await self._api.put(
                    "/snapshot/create",
                    snapshot_type="Full",
                    snapshot_path="/saved",
                    mem_file_path="/mem",
                )
            finally:
                await self._api.patch("/vm", state="Resumed")
                await self._connection.thaw(
                    GuestIdentity(epoch=line.epoch), timeout_s=self.hang_grace_s
                )
            pause_ms = (time.perf_counter() - started) * 1000
        await asyncio.to_thread(self._move_out, folder, line, pause_ms)

    def _move_out(self, folder: Path, line: LineState, pause_ms: float) -> None:
        shutil.move(self._jail / "root" / "saved", folder / STATE)
        shutil.move(self._jail / "root" / "mem", folder / MEMORY)
        checkpoint = MachineCheckpoint(
            backend=self.info.backend,
            machine_digest=self._machine_digest,
            line=line,
            num_bytes=(folder / STATE).stat().st_size,
            pause_ms=pause_ms,
        )
        save_manifest(folder, checkpoint)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await super().close()
        await asyncio.to_thread(shutil.rmtree, self._jail, ignore_errors=True)
