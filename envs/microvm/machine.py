"""Implements `Sandbox` on a socket to a guest agent, and starts the host process of a machine."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Mapping, Sequence

import msgspec

from penstock.envs.egress.outlet import EgressOutlet
from penstock.envs.microvm.confinement.confinement import Confinement, Program
from penstock.envs.microvm.connection import GuestConnection
from penstock.envs.microvm.host_process import HANG_GRACE_S, HostProcess
from penstock.envs.microvm.protocol import FilePiece, GuestRequest
from penstock.envs.sandbox import WORK_DIR, SandboxDied, SandboxTimeout, VerifierRun
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.sandbox import ExecResult

log = logging.getLogger(__name__)

READ_PIECE_BYTES = 1 << 18
"""Bytes per read request; the agent returns no more (`READ_BYTES_MAX` in `guest/agent.h`)."""
WRITE_PIECE_BYTES = 1 << 17
FILES_MAX = 20_000
DEFAULT_ENV = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": "/home/agent",
    "LC_ALL": "C.UTF-8",
    "TERM": "dumb",
    "PYTHONDONTWRITEBYTECODE": "1",
}
"""Default environment of programs.

Python writes no bytecode: extra files next to the agent's own take time and show up in listings.
"""
VERIFIER_ENV = {"HOME": "/nonexistent"}
"""Variables of verifiers: files in the agent's home could make an interpreter run its code."""


def _absolute(path: str) -> str:
    return path if path.startswith("/") else f"{WORK_DIR}/{path}"


def _encodable(text: str) -> str | bytes:
    """Return a path or argument as the guest's codec takes it; names may be any bytes."""
    return text if text.isascii() else os.fsencode(text)


class GuestSandbox:
    """Sandbox on a connection to a guest agent."""

    def __init__(
        self, connection: GuestConnection, process: HostProcess, info: SandboxRecord
    ) -> None:
        self.info = info
        self.process = process
        self.hang_grace_s = HANG_GRACE_S
        self._connection = connection
        self._outlet = EgressOutlet(connection)

    @property
    def alive(self) -> bool:
        """See `Machine.alive`."""
        return self._connection.died is None

    @property
    def was_killed(self) -> bool:
        """Whether a signal from outside ended the machine; only known once it has ended."""
        return self.process.was_killed

    async def exec(  # noqa: PLR0913
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        output_bytes_max: int = 65536,
        op_key: str = "",
    ) -> ExecResult:
        """See `Sandbox.exec`; a cancelled call kills the program."""
        run = VerifierRun(argv=list(argv), timeout_s=timeout_s, output_bytes_max=output_bytes_max)
        return await self._run("exec", run, op_key, _absolute(cwd), env)

    async def verify(self, run: VerifierRun, *, op_key: str = "") -> ExecResult:
        """See `VerifyingSandbox.verify`; a cancelled call kills the program and its peer."""
        # In the working directory an interpreter could import the code under test by accident.
        path, env = ("/", VERIFIER_ENV) if run.peer else (WORK_DIR, None)
        return await self._run("verify", run, op_key, path, env)

    async def _run(
        self, op: str, run: VerifierRun, op_key: str, path: str, env: Mapping[str, str] | None
    ) -> ExecResult:
        environment = DEFAULT_ENV | self._outlet.environment | dict(env or {})
        request = GuestRequest(
            op=op,
            op_key=op_key,
            argv=[_encodable(argument) for argument in run.argv],
            env=[f"{name}={value}" for name, value in environment.items()],
            path=path,
            deadline_ms=max(1, round(run.timeout_s * 1000)),
            bytes_max=run.output_bytes_max,
            peer=run.peer,
            covers=[text for pair in run.covers for text in pair],
        )
        deadline_s = run.timeout_s + self.hang_grace_s
        try:
            reply = await self._connection.call(request, timeout_s=deadline_s)
        except asyncio.CancelledError:
            # Otherwise the program would keep the machine busy until its deadline.
            with contextlib.suppress(SandboxDied):
                self._connection.post(GuestRequest(op="cancel", target=request.id))
            raise
        # Truncated again: a hostile guest may send more than was requested.
        return ExecResult(
            exit_code=reply.exit_code,
            stdout=reply.stdout[: request.bytes_max],
            stderr=reply.stderr[: request.bytes_max],
            truncated=reply.truncated,
            timed_out=reply.timed_out,
            duration_ms=float(reply.duration_ms),
        )

    async def allow_egress(self, rules: Sequence[str], *, allows_addresses: bool = False) -> None:
        """See `NetworkedMachine.allow_egress`."""
        await self._outlet.open(rules, allows_addresses=allows_addresses)

    async def egress_attempts(self) -> list[EgressAttempt]:
        """See `NetworkedSandbox.egress_attempts`."""
        return self._outlet.attempts

    async def ping(self) -> None:
        """Wait for an answer of the guest agent."""
        await self._connection.call(GuestRequest(op="ping"), timeout_s=self.hang_grace_s)

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """See `Sandbox.read_file`."""
        content = bytearray()
        while len(content) < bytes_max:
            piece = min(READ_PIECE_BYTES, bytes_max - len(content))
            request = GuestRequest(
                op="read", path=_encodable(_absolute(path)), offset=len(content), bytes_max=piece
            )
            reply = await self._connection.call(request, timeout_s=self.hang_grace_s)
            content += reply.data
            if len(reply.data) < piece:
                break
        return bytes(content)

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """See `Sandbox.write_files`."""
        await self._write_all("write", files, 0o644)

    async def write_verifier_files(self, files: Mapping[str, bytes]) -> None:
        """See `VerifyingSandbox.write_verifier_files`."""
        await self._write_all("write_verifier", files, 0o700)

    async def _write_all(self, op: str, files: Mapping[str, bytes], mode: int) -> None:
        batch: list[FilePiece] = []
        room = WRITE_PIECE_BYTES
        for path, data in files.items():
            for start in range(0, max(1, len(data)), WRITE_PIECE_BYTES):
                piece = data[start : start + WRITE_PIECE_BYTES]
                if len(piece) > room and batch:
                    await self._write(op, batch)
                    batch, room = [], WRITE_PIECE_BYTES
                batch.append(FilePiece(_encodable(_absolute(path)), mode, start > 0, piece))
                room -= len(piece) + len(path) + 32  # 32 bytes cover the encoding of an item
        if batch:
            await self._write(op, batch)

    async def _write(self, op: str, pieces: list[FilePiece]) -> None:
        await self._connection.call(GuestRequest(op=op, files=pieces), timeout_s=self.hang_grace_s)

    async def list_files(self, root: str) -> list[str]:
        """See `Sandbox.list_files`."""
        base = _absolute(root).rstrip("/") + "/"
        request = GuestRequest(op="list", path=base, bytes_max=FILES_MAX)
        reply = await self._connection.call(request, timeout_s=self.hang_grace_s)
        # The guest is untrusted: bound the number again, and drop paths outside of the root.
        files = [os.fsdecode(e.path) for e in reply.files[:FILES_MAX] if e.kind == "file"]
        return sorted(path[len(base) :] for path in files if path.startswith(base))

    async def close(self) -> None:
        """See `Sandbox.close`."""
        # First of all, so that calls in progress fail at once instead of waiting for the kill.
        self._connection.abort()
        await self._outlet.close()
        await self.process.kill()
        await self._connection.lost


async def start_machine(
    confinement: Confinement,
    program: Program,
    info: SandboxRecord,
    *,
    cpu: int | None,
    timeout_s: float,
) -> GuestSandbox:
    """Start the host process of a machine and wait for the guest's hello.

    Args:
        confinement: Restrictions with which to start the process.
        program: Command that runs inside; see `Confinement.start`.
        info: Record of the sandbox, to which the boot time is added.
        cpu: Host CPU to pin the machine to. One CPU is fastest: the guest's kernel and its
            processes take turns, and a wake-up on another CPU costs more than the switch.
        timeout_s: Maximum seconds until the hello.

    Raises:
        SandboxDied: The machine ended before its hello, or the host cannot start its process.
        SandboxTimeout: No hello within `timeout_s`.

    """
    started = time.perf_counter()
    process, ours = confinement.start(program, cpu)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: GuestConnection(process.last_words), sock=ours
    )
    try:
        async with asyncio.timeout(timeout_s):
            await connection.ready
    except BaseException as error:
        connection.abort()
        words = process.last_words()  # before the kill, which closes the output
        await process.kill()
        if isinstance(error, TimeoutError):
            raise SandboxTimeout(f"no hello within {timeout_s:g} s; {words}") from None
        raise
    return GuestSandbox(connection, process, booted(info, started))


def booted(info: SandboxRecord, started: float) -> SandboxRecord:
    """Return the record of a machine that is ready now.

    Args:
        info: Record without the boot time.
        started: Time of its start by `time.perf_counter`, in seconds.

    """
    boot_ms = (time.perf_counter() - started) * 1000
    log.debug("%s machine ready in %.0f ms", info.backend, boot_ms)
    return msgspec.structs.replace(info, boot_ms=boot_ms)
