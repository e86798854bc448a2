"""Operations on a leased machine, message by message; and what dead machines tried to reach."""

from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec

from penstock.envs.sandbox import (
    NetworkedMachine,
    Sandbox,
    VerifierRun,
    networked,
    verifying,
)
from penstock.messages.base import Message
from penstock.messages.rollout import EgressAttempt
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import (
    AllowEgress,
    EgressRead,
    ExecCommand,
    ExecResult,
    FileRead,
    FilesListed,
    ListFiles,
    ReadEgress,
    ReadFile,
    WriteFiles,
)

Operation = ExecCommand | ReadFile | WriteFiles | ListFiles | AllowEgress | ReadEgress
RECORDS_MAX = 1024
_PRESSURE = Path("/proc/pressure/cpu")


async def operate(sandbox: Sandbox, message: Operation, *, egress_addresses: bool) -> Message:
    """Carry out one operation; return the answer.

    Args:
        sandbox: The machine.
        message: The operation.
        egress_addresses: See `SandboxHostConfig`.

    Raises:
        SandboxError: As the operation of `Sandbox`.

    """
    match message:
        case ExecCommand():
            before = _starved_us()
            result = await _execute(sandbox, message)
            starved_ms = min((_starved_us() - before) / 1e3, result.duration_ms)
            return msgspec.structs.replace(result, starved_ms=starved_ms)
        case ReadFile():
            return FileRead(data=await sandbox.read_file(message.path, message.num_bytes_max))
        case WriteFiles():
            if message.is_verifier:
                await verifying(sandbox).write_verifier_files(message.files)
            else:
                await sandbox.write_files(message.files)
            return Ack()
        case ListFiles():
            paths = await sandbox.list_files(message.root)
            return FilesListed(paths=[_as_text(path) for path in paths])
        case AllowEgress():
            machine = cast("NetworkedMachine", networked(sandbox))
            await machine.allow_egress(message.rules, allows_addresses=egress_addresses)
            return Ack()
        case ReadEgress():
            return EgressRead(attempts=await networked(sandbox).egress_attempts())


async def _execute(sandbox: Sandbox, command: ExecCommand) -> ExecResult:
    if command.peer or command.covers:
        run = VerifierRun(
            argv=command.argv,
            timeout_s=command.timeout_s,
            output_bytes_max=command.output_bytes_max,
            peer=command.peer,
            covers=command.covers,
        )
        return await verifying(sandbox).verify(run, op_key=command.op_key)
    return await sandbox.exec(
        command.argv,
        cwd=command.cwd,
        env=command.env,
        timeout_s=command.timeout_s,
        output_bytes_max=command.output_bytes_max,
        op_key=command.op_key,
    )


def _starved_us() -> int:
    """Return for how long some program of this host has waited for a processor; 0 if unknown."""
    try:
        some = _PRESSURE.read_text().partition("\n")[0]
        return int(some.rpartition("total=")[2])
    except (OSError, ValueError):
        return 0


def _as_text(path: str) -> str:
    """Return a path that can travel: bytes that are no UTF-8 become U+FFFD."""
    return path.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


class LostRecords:
    """Egress records of machines that died in use, by lease; the oldest are forgotten.

    The proxy's record is the host's, not the guest's, so it outlives the machine.
    """

    def __init__(self) -> None:
        self._records: OrderedDict[str, list[EgressAttempt]] = OrderedDict()

    def keep(self, lease_id: str, attempts: Sequence[EgressAttempt]) -> None:
        """Keep the record of one machine."""
        self._records[lease_id] = list(attempts)
        if len(self._records) > RECORDS_MAX:
            self._records.popitem(last=False)

    def find(self, lease_id: str) -> list[EgressAttempt] | None:
        """Return the record of one machine; None if there is none."""
        return self._records.get(lease_id)
