"""Machines of simulated hosts: files in memory, and a death at a chosen operation."""

import asyncio
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.envs.microvm.host_process import HANG_GRACE_S
from penstock.envs.sandbox import (
    Capability,
    IsolationClass,
    SandboxDied,
    SandboxError,
    SandboxTimeout,
)
from penstock.examples.quickstart.ladder.dry_run import DryRunSandbox, run_program
from penstock.messages.sandbox import ExecResult


class FakeMachine(DryRunSandbox):
    """Files in memory; dies at its operation number `dies_at`."""

    def __init__(self, dies_at: int, delay_s: float, padding: bytes) -> None:
        super().__init__({})
        self._padding = padding
        self.alive = True
        self.commands: list[list[str]] = []
        self._results: dict[str, asyncio.Task[ExecResult]] = {}
        self._dies_at = dies_at
        self._delay_s = delay_s
        self._num_operations = 0
        self.exec_s = 0.0
        self.was_killed = False
        self.hangs = False

    async def _operate(self, timeout_s: float = 0.0) -> None:
        self._num_operations += 1
        await asyncio.sleep(self._delay_s)
        is_over = 0 < self._dies_at <= self._num_operations
        if is_over and self.hangs:
            await asyncio.sleep(timeout_s + HANG_GRACE_S)
            raise SandboxTimeout("no answer")
        if is_over:
            self.alive = False
        if not self.alive:
            raise SandboxDied("killed by the test")

    async def exec(self, argv: Sequence[str], *, op_key: str = "", **options: object) -> ExecResult:
        if op_key not in self._results:
            self._results[op_key] = asyncio.create_task(self._run(argv, options))
        return await asyncio.shield(self._results[op_key])

    async def _run(self, argv: Sequence[str], options: dict) -> ExecResult:
        await self._operate(float(str(options["timeout_s"])))
        self.commands.append(list(argv))
        await asyncio.sleep(self.exec_s)
        if argv[0] == "rm":
            self.files.pop(argv[-1])
            return ExecResult(exit_code=0)
        if argv[0] == "bash":
            return self._run_script(argv[1])
        if argv[0] == "python3":
            code, output = run_program(self.files, argv[-1])
            return ExecResult(exit_code=code, stdout=output.encode())
        done = await super().exec(argv, **options)
        return msgspec.structs.replace(done, duration_ms=1e3 * self.exec_s)

    def _run_script(self, name: str) -> ExecResult:
        """Run a test's own `setup.sh` on the files, in a folder of the test's machine."""
        with tempfile.TemporaryDirectory() as folder:
            for path, text in self.files.items():
                place = Path(folder, path.lstrip("/"))
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(text)
            done = subprocess.run(["bash", name], cwd=folder, capture_output=True, check=False)
            kept = {path: text for path, text in self.files.items() if path.startswith("/")}
            home = [Path(folder, path.lstrip("/")) for path in kept]
            found = (place for place in Path(folder).rglob("*") if place.is_file())
            there = {
                str(place.relative_to(folder)): place.read_text()
                for place in found
                if place not in home
            }
        self.files = kept | there
        return ExecResult(exit_code=done.returncode, stderr=done.stderr)

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        await self._operate()
        data = await super().read_file(path, bytes_max)
        return data + self._padding if path == "other.py" else data

    async def write_files(self, files: dict[str, bytes], *, keeps_modes: bool = True) -> None:
        await self._operate()
        await super().write_files(files, keeps_modes=keeps_modes)

    async def close(self) -> None:
        self.alive = False


class FakeBackend:
    """Boots fake machines; `deaths[n]` says at which operation machine n dies, -1 any other."""

    name = "dry_run"
    isolation_class = IsolationClass.PROCESS
    capabilities = frozenset({Capability.COLD_BOOT})

    def __init__(self) -> None:
        self.machines: list[FakeMachine] = []
        self.deaths: dict[int, int] = {}
        self.padding: dict[int, bytes] = {}
        """Machine -> what reading `other.py` gives after its text."""
        self.delay_s = 0.002
        self.exec_s = 0.0
        """How long each program runs, by its guest's clock."""
        self.are_killed = False
        """Whether those that die are killed from outside."""
        self.hang = False
        """Whether those that die fall silent instead, until their host notices."""
        self.is_broken = False

    async def start(self, *, cpu: int | None = None, timeout_s: float = 10.0) -> FakeMachine:
        await asyncio.sleep(0.02)
        if self.is_broken:
            raise SandboxError("no boot today")
        dies_at = self.deaths.get(len(self.machines), self.deaths.get(-1, 0))
        padding = self.padding.get(len(self.machines), b"")
        self.machines.append(FakeMachine(dies_at, self.delay_s, padding))
        self.machines[-1].exec_s = self.exec_s
        self.machines[-1].was_killed = self.are_killed
        self.machines[-1].hangs = self.hang
        return self.machines[-1]
