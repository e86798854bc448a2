"""Finds out which sandbox backends work on this host by booting each one and running guest code."""

import time
from pathlib import Path

import msgspec

from penstock.envs.backends import backends, open_backend
from penstock.envs.microvm.images.assets import QemuAssets, VmAssets
from penstock.envs.sandbox import SandboxError

EXECS = 5
"""Programs to run per backend; their median time is reported."""
BOOT_TIMEOUT_S = 20.0


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """State of a backend as shown by `penstock doctor`."""

    name: str
    available: bool
    reason: str
    how_to_get: str = ""
    boot_ms: float = 0.0
    exec_ms: float = 0.0
    """Median milliseconds of a few runs of `true`."""


async def probe_backend(name: str, cache: Path | None = None) -> ProbeResult:
    """Boot one backend, run a program in it, and time both."""
    try:
        machine = await open_backend(name, allow_process=True, cache=cache).start(
            timeout_s=BOOT_TIMEOUT_S
        )
    except (SandboxError, OSError) as error:
        # Firecracker boots the kernel of the QEMU assets.
        assets = QemuAssets if name.startswith(("qemu", "fire")) else VmAssets
        return ProbeResult(
            name=name, available=False, reason=str(error), how_to_get=assets.how_to_get
        )
    try:
        times = []
        for _ in range(EXECS):
            started = time.perf_counter()
            result = await machine.exec(["true"], timeout_s=BOOT_TIMEOUT_S)
            times.append((time.perf_counter() - started) * 1000)
            if result.exit_code != 0:
                return ProbeResult(name=name, available=False, reason=f"`true` returned {result}")
    except SandboxError as error:
        return ProbeResult(name=name, available=False, reason=str(error))
    finally:
        await machine.close()
    return ProbeResult(
        name=name,
        available=True,
        reason=f"ran guest code, isolation class {machine.info.isolation_class}",
        boot_ms=machine.info.boot_ms,
        exec_ms=sorted(times)[EXECS // 2],
    )


async def probe(cache: Path | None = None) -> list[ProbeResult]:
    """Probe every backend."""
    return [await probe_backend(name, cache) for name in backends]
