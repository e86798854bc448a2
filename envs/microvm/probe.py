"""Which sandbox backends work here, found out by booting them and running guest code."""

import time
from pathlib import Path

import msgspec

from penstock.envs.microvm.assets import HOW_TO_GET
from penstock.envs.sandbox import SandboxError, backends, open_backend

EXECS = 5
BOOT_TIMEOUT_S = 20.0
NOT_BUILT = {
    "firecracker": "this version of Penstock has no Firecracker backend",
    "qemu-tcg": "this version of Penstock has no QEMU backend",
}


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What `penstock doctor` shows of one backend."""

    name: str
    available: bool
    reason: str
    how_to_get: str = ""
    boot_ms: float = 0.0
    exec_ms: float = 0.0
    """Median of a few runs of `true`."""


def _kvm_note() -> str:
    there = Path("/dev/kvm").exists()
    return "; /dev/kvm is there, which alone proves nothing" if there else ""


async def _probe(name: str, cache: Path | None) -> ProbeResult:
    try:
        machine = await open_backend(name, allow_process=True, cache=cache).start(
            timeout_s=BOOT_TIMEOUT_S
        )
    except (SandboxError, OSError) as error:
        return ProbeResult(name=name, available=False, reason=str(error), how_to_get=HOW_TO_GET)
    try:
        times = []
        for _ in range(EXECS):
            started = time.perf_counter()
            result = await machine.exec(["true"], timeout_s=BOOT_TIMEOUT_S)
            times.append((time.perf_counter() - started) * 1000)
            if result.exit_code != 0:
                return ProbeResult(name=name, available=False, reason=f"`true` gave {result}")
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
    """Boot each backend, run a program in it, and time both."""
    results = [await _probe(name, cache) for name in backends]
    return results + [
        ProbeResult(name=name, available=False, reason=reason + _kvm_note())
        for name, reason in NOT_BUILT.items()
    ]
