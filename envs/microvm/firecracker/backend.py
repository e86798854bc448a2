"""Experimental backend: Firecracker in its jailer, hardware machines for hosts with real KVM.

It follows the published API (1.16) and was tested only against a server that checks requests by
those rules, because no binary was available: **it has never driven a real Firecracker**.

```
 template: boots once, freezes, pauses, is saved          machine: PUT /snapshot/load, vsock, thaw
 <jails>/firecracker/<id>/root/   root folder of one Firecracker; removed with it
```
Firecracker resets the vsock device when it loads a snapshot; the frozen agent then listens again.
"""

import asyncio
import os
import shutil
import time
import uuid
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.envs.microvm.checkpoint import (
    MEMORY,
    STATE,
    MachineCheckpoint,
    load_checkpoint,
    save_manifest,
)
from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.firecracker.api import (
    VSOCK_PORT,
    FirecrackerApi,
    await_socket,
    connect_vsock,
)
from penstock.envs.microvm.host_process import HostProcess
from penstock.envs.microvm.images.assets import digest_bytes, load_assets, load_qemu_assets
from penstock.envs.microvm.machine import GuestSandbox, booted
from penstock.envs.microvm.protocol import GuestIdentity, LineState
from penstock.envs.needs import DEFAULT_NEEDS, resolve_machine_size
from penstock.envs.sandbox import (
    BackendUnavailable,
    Capability,
    IsolationClass,
    SandboxDied,
    SandboxFileError,
    SandboxTimeout,
)
from penstock.messages.rollout import SandboxRecord
from penstock.messages.task import MachineNeeds

SAVE_DEADLINE_S = 60.0


class FirecrackerMachine(GuestSandbox):
    """Machine in its own jail, which can be saved while it runs."""

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
        # A second save would find the guest frozen already.
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


UID = 1000
JAILS_CHARS_MAX = 60
"""Maximum length of the jails' folder: a socket path has at most 107 bytes, jails take the rest."""
TEMPLATE_DEADLINE_S = 20.0
BOOT_WORDS = f"quiet panic=-1 reboot=k pci=off penstock_line=vsock:{VSOCK_PORT}"


class FirecrackerBackend:
    """Starts machines as copies of a template that it boots once; experimental.

    Args:
        cache: Folder with kernel, image and agent; defaults to `assets.vm_cache_dir()`.
        needs: Size of its machines; see `resolve_machine_size`.
        jails: Folder of the jails, on the file system of the cache because files are hard-linked.
        jailer: Command of the jailer up to Firecracker's path; defaults to the programs in PATH.

    Raises:
        BackendUnavailable: A program, the kernel or the image is missing.

    """

    name = "firecracker"
    isolation_class = IsolationClass.HARDWARE_VM
    capabilities = frozenset(
        {
            *(Capability.COLD_BOOT, Capability.OWN_KERNEL, Capability.RAM_SNAPSHOT),
            *(Capability.FORK, Capability.CHECKPOINT),
        }
    )

    processors_max = os.cpu_count() or 1
    memory_mib = 256
    """Default memory of a machine."""

    def __init__(
        self,
        cache: Path | None = None,
        needs: MachineNeeds = DEFAULT_NEEDS,
        *,
        jails: Path | None = None,
        jailer: tuple[str, ...] = (),
    ) -> None:
        folder, base = load_assets(cache)
        qemu_folder, kernel = load_qemu_assets(cache)
        self._jailer = jailer or (_find("jailer"), "--exec-file", _find("firecracker"))
        self._files = {
            "kernel": qemu_folder / kernel.kernel,
            "initramfs": qemu_folder / kernel.initramfs,
            "image": folder / base.image,
        }
        self.needs = resolve_machine_size(needs, self)
        self._opened_with = {"cache": cache, "jails": jails, "jailer": jailer}
        self._jails = jails or folder / "jails"
        if len(str(self._jails)) > JAILS_CHARS_MAX:
            raise BackendUnavailable(
                f"{self._jails}: expected a path of at most {JAILS_CHARS_MAX} characters, "
                "because of the sockets in it"
            )
        self._template: Path | None = None
        self._making = asyncio.Lock()
        self._info = SandboxRecord(
            backend=self.name,
            isolation_class=self.isolation_class,
            kernel_digest=kernel.kernel_digest,
            image_digest=base.image_digest,
            boot_ms=0.0,
        )
        digests = (kernel.kernel_digest, base.image_digest)
        self.machine_digest = digest_bytes(
            *(text.encode() for text in (self.name, repr(self.needs), *digests))
        )

    def resized(self, needs: MachineNeeds) -> "FirecrackerBackend":
        """See `SizedBackend.resized`."""
        return FirecrackerBackend(needs=needs, **self._opened_with)

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> FirecrackerMachine:
        """See `SandboxBackend.start`; the first call also boots the template."""
        # Concurrent first calls share one boot.
        async with self._making:
            if self._template is None:
                self._template = await self._make_template()
        return await self.restore(self._template, cpu=cpu, timeout_s=timeout_s)

    async def _make_template(self) -> Path:
        folder = self._jails / f"template-{uuid.uuid4().hex[:16]}"
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        machine = await self.cold_boot(timeout_s=TEMPLATE_DEADLINE_S)
        try:
            await machine.checkpoint(folder)
        finally:
            await machine.close()
        return folder

    async def cold_boot(
        self, *, cpu: int | None = None, timeout_s: float = 10.0
    ) -> FirecrackerMachine:
        """Boot one machine from its kernel."""
        started, needs = time.perf_counter(), self.needs
        disk = f" penstock_disk_mib={needs.disk_mib}" if needs.disk_mib else ""
        async with self._jailed(self._files, cpu, timeout_s) as (process, jail, api):
            await api.put(
                "/machine-config", vcpu_count=needs.processors, mem_size_mib=needs.memory_mib
            )
            await api.put(
                "/boot-source",
                kernel_image_path="/kernel",
                initrd_path="/initramfs",
                boot_args=BOOT_WORDS + disk,
            )
            await api.put(
                "/drives/image",
                drive_id="image",
                path_on_host="/image",
                is_root_device=False,
                is_read_only=True,
            )
            await api.put("/vsock", guest_cid=3, uds_path="/vsock.sock")
            await api.put("/actions", action_type="InstanceStart")
            connection = await self._connect(process, jail, None, timeout_s)
        return self._machine(connection, process, jail, started)

    async def restore(
        self, folder: Path, *, cpu: int | None = None, timeout_s: float = 10.0
    ) -> FirecrackerMachine:
        """See `SavingBackend.restore`."""
        started = time.perf_counter()
        saved = load_checkpoint(folder, backend=self.name, machine_digest=self.machine_digest)
        files = {"image": self._files["image"], "saved": folder / STATE, "mem": folder / MEMORY}
        async with self._jailed(files, cpu, timeout_s) as (process, jail, api):
            memory = {"backend_type": "File", "backend_path": "/mem"}
            await api.put(
                "/snapshot/load", snapshot_path="/saved", mem_backend=memory, resume_vm=True
            )
            connection = await self._connect(process, jail, saved.line, timeout_s)
        return self._machine(connection, process, jail, started)

    def _machine(
        self, connection: GuestConnection, process: HostProcess, jail: Path, started: float
    ) -> FirecrackerMachine:
        record = booted(self._info, started)
        return FirecrackerMachine(connection, process, record, jail, self.machine_digest)

    @staticmethod
    async def _connect(
        process: HostProcess, jail: Path, line: LineState | None, timeout_s: float
    ) -> GuestConnection:
        """Connect to a booting guest, or to a frozen one, which then resumes as a new machine."""
        _, connection = await connect_vsock(
            jail / "root" / "vsock.sock",
            lambda: GuestConnection(process.last_words, line),
            deadline_s=timeout_s,
        )
        try:
            if line is None:
                await connection.ready
            else:
                await connection.thaw(GuestIdentity.new(line.epoch + 1), timeout_s=timeout_s)
        except BaseException:
            connection.abort()
            raise
        return connection

    @asynccontextmanager
    async def _jailed(
        self, files: dict[str, Path], cpu: int | None, timeout_s: float
    ) -> AsyncIterator[tuple[HostProcess, Path, FirecrackerApi]]:
        """Start Firecracker in a new jail; an error in the block ends the process and the jail."""
        name = uuid.uuid4().hex[:16]
        jail = self._jails / "firecracker" / name
        await asyncio.to_thread(_fill_jail, jail / "root", files)
        process = HostProcess(self._command(name), cpu, ())
        try:
            async with asyncio.timeout(timeout_s):
                await await_socket(jail / "root" / "api.sock", deadline_s=timeout_s)
                yield process, jail, FirecrackerApi(jail / "root" / "api.sock", timeout_s)
        except BaseException as error:
            words = process.last_words()
            await process.kill()
            await asyncio.to_thread(shutil.rmtree, jail, ignore_errors=True)
            if isinstance(error, TimeoutError) and not isinstance(error, SandboxTimeout):
                raise SandboxTimeout(f"not ready within {timeout_s:g} s; {words}") from error
            if isinstance(error, SandboxDied):
                raise SandboxDied(f"{error}; {words}") from error
            raise

    def _command(self, name: str) -> list[str]:
        return [
            *self._jailer,
            *("--id", name, "--uid", str(UID), "--gid", str(UID)),
            *("--chroot-base-dir", str(self._jails), "--", "--api-sock", "/api.sock"),
        ]


def _find(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        raise BackendUnavailable(
            f"{program} is missing: github.com/firecracker-microvm/firecracker (this backend is "
            "experimental: it has never driven a real Firecracker)"
        )
    return path


def _fill_jail(root: Path, files: dict[str, Path]) -> None:
    root.mkdir(parents=True)
    os.chown(root, UID, UID)
    for name, path in files.items():
        os.link(path, root / name)
