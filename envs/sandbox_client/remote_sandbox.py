"""Implements the `Sandbox` protocol with requests to the host that runs the machine."""

import contextlib
import hashlib
import itertools
from collections.abc import Mapping, Sequence

from penstock.envs.sandbox import WORK_DIR, SandboxError, VerifierRun
from penstock.envs.sandbox_client.client import (
    LeaseSpec,
    M,
    SandboxClient,
    SavedSandbox,
    call,
    host_service,
)
from penstock.messages.base import Message
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.rpc import Ack
from penstock.messages.sandbox import (
    AcquireSandbox,
    AllowEgress,
    EgressRead,
    ExecCommand,
    ExecResult,
    FileRead,
    FilesListed,
    ListFiles,
    ReadEgress,
    ReadFile,
    ReleaseSandbox,
    SandboxLeased,
    SandboxSaved,
    SaveSandbox,
    WriteFiles,
)

SAVE_S_MAX = 60.0
"""Maximum seconds that saving a machine may take."""


class RemoteSandbox:
    """Sandbox on another host; a missing answer counts as a lost machine."""

    def __init__(self, client: SandboxClient, leased: SandboxLeased, spec: LeaseSpec) -> None:
        """Use a machine that a host has leased."""
        self.info: SandboxRecord = leased.sandbox
        self.host = leased.host
        self.guest_s = 0.0
        """Seconds that programs ran in the machine, without the time its host was starved of
        CPU."""
        self._client = client
        self._leased = leased
        self._spec = spec
        self._op_numbers = itertools.count()
        # A copy of a machine remembers the operation keys of its original: without a prefix per
        # lease, the copy would answer a new command with an old result.
        self._op_prefix = hashlib.blake2s(leased.lease_id.encode(), digest_size=8).hexdigest()

    async def exec(  # noqa: PLR0913 - the protocol requires them
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str = WORK_DIR,
        env: Mapping[str, str] | None = None,
        output_bytes_max: int = 65536,
        op_key: str = "",
    ) -> ExecResult:
        """Run a program; it runs once even if the request is delivered several times."""
        run = VerifierRun(argv=list(argv), timeout_s=timeout_s, output_bytes_max=output_bytes_max)
        result = await self._run(run, op_key, cwd, env or {})
        running_s = (result.duration_ms - result.starved_ms) / 1e3
        # The guest measures its own duration, so the number is untrusted: clamp it.
        self.guest_s += min(max(0.0, running_s), timeout_s)
        return result

    async def verify(self, run: VerifierRun, *, op_key: str = "") -> ExecResult:
        """Run a test program, separated from the code under test; otherwise like `exec`."""
        return await self._run(run, op_key, WORK_DIR, {})

    async def _run(
        self, run: VerifierRun, op_key: str, cwd: str, env: Mapping[str, str]
    ) -> ExecResult:
        command = ExecCommand(
            lease_id=self._leased.lease_id,
            op_key=op_key or f"{self._op_prefix}-{next(self._op_numbers)}",
            argv=run.argv,
            cwd=cwd,
            env=dict(env),
            timeout_s=run.timeout_s,
            output_bytes_max=run.output_bytes_max,
            peer=run.peer,
            covers=run.covers,
        )
        return await self._call(command, ExecResult, within_s=run.timeout_s)

    async def read_file(self, path: str, bytes_max: int) -> bytes:
        """Return the first `bytes_max` bytes of a regular file."""
        message = ReadFile(lease_id=self._leased.lease_id, path=path, num_bytes_max=bytes_max)
        return (await self._call(message, FileRead)).data

    async def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files and their parent folders."""
        message = WriteFiles(lease_id=self._leased.lease_id, files=dict(files))
        await self._call(message, Ack)

    async def write_verifier_files(self, files: Mapping[str, bytes]) -> None:
        """Write whole files that only the verifier's user can read."""
        lease_id = self._leased.lease_id
        message = WriteFiles(lease_id=lease_id, files=dict(files), is_verifier=True)
        await self._call(message, Ack)

    async def list_files(self, root: str) -> list[str]:
        """Return the regular files below `root`, relative to it, sorted."""
        message = ListFiles(lease_id=self._leased.lease_id, root=root)
        return (await self._call(message, FilesListed)).paths

    async def allow_egress(self, rules: Sequence[str]) -> None:
        """See `NetworkedSandbox.allow_egress`."""
        await self._call(AllowEgress(lease_id=self._leased.lease_id, rules=list(rules)), Ack)

    async def egress_attempts(self) -> list[EgressAttempt]:
        """See `NetworkedSandbox.egress_attempts`."""
        return (await self._call(ReadEgress(lease_id=self._leased.lease_id), EgressRead)).attempts

    async def save(self, checkpoint_id: str) -> SavedSandbox:
        """Save the machine while it runs; `LeaseSpec.branch_of` resumes from the checkpoint.

        Raises:
            SandboxError: The backend cannot save machines, or failed to; the machine continues.

        """
        message = SaveSandbox(lease_id=self._leased.lease_id, checkpoint_id=checkpoint_id)
        saved = await self._call(message, SandboxSaved, within_s=SAVE_S_MAX)
        return SavedSandbox(checkpoint_id=saved.checkpoint_id, host=saved.host)

    async def close(self) -> None:
        """Release the machine; a host that does not answer ends it when the lease expires."""
        with contextlib.suppress(SandboxError):
            await self._call(ReleaseSandbox(lease_id=self._leased.lease_id), Ack)

    async def renew(self, deadline_s: float) -> None:
        """Renew the lease; raise `SandboxDied` if it is gone."""
        message = AcquireSandbox(
            lease_id=self._leased.lease_id,
            holder=self._spec.holder,
            lease_s=self._spec.lease_s,
        )
        service = host_service(self._leased.host)
        await call(self._client, service, message, SandboxLeased, deadline_s)

    async def _call(self, message: Message, expected: type[M], *, within_s: float = 0.0) -> M:
        service = host_service(self._leased.host)
        deadline_s = within_s + self._spec.margin_s
        return await call(self._client, service, message, expected, deadline_s)
