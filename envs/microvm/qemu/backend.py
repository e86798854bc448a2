"""Backends that run QEMU's microvm machine in bubblewrap; it can be copied and saved.

```
 template: boots once, freezes, stops; its memory is a sealed memfd, its devices 13 KB
     └─ clone: maps that memory copy-on-write, loads the devices, resumes, thaws   = `start`
           └─ checkpoint: freezes, stops; memory and devices are copied; resumes, thaws
                 └─ copy: like a clone, but of the checkpoint; any number of times = `restore`
```
"""

import asyncio
import logging
import os
import time
from collections import deque
from pathlib import Path

from penstock.envs.microvm.checkpoint import load_checkpoint
from penstock.envs.microvm.images.assets import digest_bytes, load_qemu_assets
from penstock.envs.microvm.images.layers import LayeredBackend
from penstock.envs.microvm.qemu.command import MACHINE, QemuCommand
from penstock.envs.microvm.qemu.machine import MachineKind, QemuMachine, make_template, resume
from penstock.envs.microvm.qemu.memory import SavedMachine, load_saved
from penstock.envs.needs import DEFAULT_NEEDS
from penstock.envs.sandbox import BackendUnavailable, Capability, IsolationClass
from penstock.messages.task import MachineNeeds

log = logging.getLogger(__name__)

PREPARED_MAX = 16
"""Maximum paused copies kept ready; the oldest end for newer ones."""


class QemuTcgBackend(LayeredBackend):
    """Starts machines as copies of a template that it boots once, with an emulated processor."""

    name = "qemu-tcg"
    isolation_class = IsolationClass.EMULATED_VM
    capabilities = frozenset(
        {
            *(Capability.COLD_BOOT, Capability.OWN_KERNEL, Capability.RAM_SNAPSHOT),
            *(Capability.FORK, Capability.CHECKPOINT, Capability.LAYERS, Capability.NETWORK),
        }
    )
    processors_max = os.cpu_count() or 1
    memory_mib = 256
    accelerator = "tcg,thread=multi,tb-size=64"
    devices: tuple[str, ...] = ()
    """Device files of the host that the confined process may open."""
    template_deadline_s = 120.0
    """Maximum seconds to boot the template, which takes 1.5 s on a free core and much longer on a
    busy host."""

    def __init__(
        self,
        cache: Path | None = None,
        layer: str | Path = "",
        needs: MachineNeeds = DEFAULT_NEEDS,
    ) -> None:
        for device in self.devices:
            if not os.access(device, os.R_OK | os.W_OK):
                raise BackendUnavailable(
                    f"{device}: expected a device that this user may open; it is absent or denied"
                )
        super().__init__(cache, layer, needs)
        folder, self.assets = load_qemu_assets(cache)
        self._mem_bytes = self.needs.memory_mib << 20
        self._template: SavedMachine | None = None
        self._prepared: deque[tuple[SavedMachine, QemuMachine]] = deque()
        self._making = asyncio.Lock()
        files = {kind: folder / name for kind, name in self.assets.files().items()} | self._files
        command = QemuCommand(
            self._folder / self._base.launcher,
            files,
            needs=self.needs,
            accelerator=self.accelerator,
            devices=self.devices,
            layer_options=self._layer_options("/dev/vd"),
        )
        info = self._record(self.assets.kernel_digest, command.confinement)
        # Everything that the layout of a saved state depends on; see `MachineCheckpoint`.
        digest = digest_bytes(
            *(text.encode() for text in (self.accelerator, MACHINE, repr(self.needs))),
            *(text.encode() for text in (info.kernel_digest, info.image_digest)),
            self.assets.program_digest.encode(),
        )
        self._kind = MachineKind(digest=digest, command=command, info=info, settings=self.settings)

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> QemuMachine:
        """See `SandboxBackend.start`.

        The first call also boots the template, which `timeout_s` does not cover.

        Raises:
            ImageAbsent: The layer's file is gone.

        """
        self._check_layer()
        template = await self._get_template()
        return await self._copy(template, time.perf_counter(), cpu, timeout_s)

    async def _get_template(self) -> SavedMachine:
        # Concurrent first calls share one boot.
        async with self._making:
            if self._template is None:
                started = time.perf_counter()
                self._template = await make_template(
                    self._kind, deadline_s=self.template_deadline_s
                )
                log.info("%s template made in %.1f s", self.name, time.perf_counter() - started)
        return self._template

    async def _copy(
        self, saved: SavedMachine, asked_at: float, cpu: int | None, timeout_s: float
    ) -> QemuMachine:
        if machine := self._take_prepared(saved):
            await machine.take_up(asked_at=asked_at, timeout_s=timeout_s)
            return machine
        return await resume(self._kind, saved, asked_at=asked_at, cpu=cpu, timeout_s=timeout_s)

    async def restore(
        self, folder: Path, *, cpu: int | None = None, timeout_s: float = 10.0
    ) -> QemuMachine:
        """See `SavingBackend.restore`; raise `ImageAbsent` if the layer's file is gone."""
        self._check_layer()
        asked_at = time.perf_counter()
        return await self._copy(await self._get_saved(folder), asked_at, cpu, timeout_s)

    async def _get_saved(self, folder: Path) -> SavedMachine:
        found = load_checkpoint(folder, backend=self.name, machine_digest=self._kind.digest)
        # Copies of one checkpoint that start together read its memory from disk only once.
        async with self._making:
            saved = self._kind.kept.get(found.token)
            if saved is None:
                saved = await asyncio.to_thread(load_saved, folder, found.line, self._mem_bytes)
            self._kind.keep(found.token, saved)
        return saved

    async def prepare(self, num_copies: int, folder: Path | None = None) -> None:
        """Make paused copies in advance, which `start` or `restore` then return in milliseconds.

        They are not pinned to a CPU. Each copy runs once before it is paused, under an identity
        that is never used again, so that QEMU has translated its code.

        Args:
            num_copies: Copies to make; at most `PREPARED_MAX` are kept, the newest ones.
            folder: Checkpoint to copy, for `restore`; defaults to the template, for `start`.

        """
        saved = await (self._get_saved(folder) if folder else self._get_template())
        await asyncio.gather(*(self._prepare(saved) for _ in range(min(num_copies, PREPARED_MAX))))
        while len(self._prepared) > PREPARED_MAX:
            await self._prepared.popleft()[1].close()

    async def _prepare(self, saved: SavedMachine) -> None:
        asked_at = time.perf_counter()
        deadline_s = self.template_deadline_s
        machine = await resume(self._kind, saved, asked_at=asked_at, cpu=None, timeout_s=deadline_s)
        try:
            await machine.stand_by()
        except BaseException:
            await machine.close()
            raise
        self._prepared.append((saved, machine))

    def _take_prepared(self, saved: SavedMachine) -> QemuMachine | None:
        for prepared in self._prepared:
            source, machine = prepared
            if source is saved and machine.alive:
                self._prepared.remove(prepared)
                return machine
        return None

    async def close(self) -> None:
        """End the prepared copies; machines in use continue."""
        while self._prepared:
            await self._prepared.popleft()[1].close()


class QemuKvmBackend(QemuTcgBackend):
    """Like `QemuTcgBackend`, but with hardware virtualization, where KVM works."""

    name = "qemu-kvm"
    isolation_class = IsolationClass.HARDWARE_VM
    accelerator = "kvm"
    devices = ("/dev/kvm",)
    template_deadline_s = 8.0
    """Maximum seconds to boot the template: fails on hosts that offer KVM but emulate it at a
    hundredth of the speed."""
