"""Requests to sandbox hosts and their replies; not kept on a stream."""

import os

from penstock.messages.base import Message
from penstock.messages.errors import CodecError
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.task import MachineNeeds

_RAW = "\0"
"""Mark of a name whose bytes follow in hex: no name and no argument has a NUL."""


class AcquireSandbox(Message, frozen=True, kw_only=True):
    """Rollout worker or judge -> any sandbox host with room: lease a machine."""

    lease_id: str
    """Lease id chosen by the client; repeating the request gets the same machine."""
    holder: str
    lease_s: float
    """Seconds after the last request naming the lease until the machine is reclaimed."""
    is_placed: bool = False
    """Whether the request goes to the host named by a placement, which may then grant the lease."""
    checkpoint_id: str = ""
    """Checkpoint on the host to start from; requires `is_placed`."""
    group_id: str = ""
    """Placed group of the machine, which the host reports as held."""
    image_digest: str = ""
    """Digest of the image layer above the base image; empty for the host's default."""
    machine: MachineNeeds = MachineNeeds()
    """Requirements on the machine; by default, those of the host's pool."""
    is_grading: bool = False
    """Whether it may use slots reserved for grading, which keep new rollouts from starving it."""
    avoid_host: str = ""
    """Host that must leave this request to others."""
    takes_over: bool = False
    """Whether to end the holder's earlier leases on this host, whose owner may have died."""


class SandboxLeased(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: a machine was leased."""

    lease_id: str
    host: str
    """Host to which further requests for this lease go."""
    sandbox: SandboxRecord


class ExecCommand(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: run a program in a leased machine."""

    lease_id: str
    op_key: str
    """Idempotency key; a repeat with the same key does not run the program again."""
    argv: list[str]
    cwd: str = "/work"
    env: dict[str, str] = {}
    timeout_s: float = 10.0
    output_bytes_max: int = 65536
    peer: list[str] = []
    """Command of the code under test, run next to `argv` by another user
    (`envs.sandbox.VerifierRun`)."""
    covers: list[tuple[str, str]] = []


class ExecResult(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: result of a program."""

    exit_code: int
    """Exit code, or the negative signal number if a signal ended the program."""
    stdout: bytes = b""
    """First `output_bytes_max` bytes of standard output; `stderr` likewise."""
    stderr: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    """Whether the process group was killed at the deadline."""
    duration_ms: float = 0.0
    starved_ms: float = 0.0
    """Part of `duration_ms` in which programs on the machine's host waited for a CPU."""


class ReadFile(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: read a file of a leased machine."""

    lease_id: str
    path: str
    num_bytes_max: int


class FileRead(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: bytes of the file."""

    data: bytes


class WriteFiles(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: write files into a leased machine, creating parent folders."""

    lease_id: str
    files: dict[str, bytes]
    is_verifier: bool = False
    """Whether the files belong to the verifier, so that the code under test cannot read them."""
    keeps_modes: bool = True
    """Whether files that are there keep their modes."""


class ListFiles(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: list regular files below `root`, recursively."""

    lease_id: str
    root: str


class FilesListed(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: sorted paths, relative to the requested root."""

    paths: list[str]


class AllowEgress(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: let a machine's programs reach some hosts via the audited proxy."""

    lease_id: str
    rules: list[str]
    """Allowed hosts, as in `Task.egress`; repeating the same rules changes nothing."""


class ReadEgress(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: read the network attempts of a leased machine."""

    lease_id: str


class EgressRead(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: network attempts, the ended ones in order, then the open ones."""

    attempts: list[EgressAttempt]


class ReleaseSandbox(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: release a machine, which is then destroyed."""

    lease_id: str


class SaveSandbox(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: save the state of a leased machine, which keeps running."""

    lease_id: str
    checkpoint_id: str
    """Checkpoint id chosen by the client; repeating the request does not save again."""


class SandboxSaved(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: any number of machines can start from the checkpoint."""

    checkpoint_id: str
    host: str


class AcquireGroup(Message, frozen=True, kw_only=True):
    """Client -> host named by a placement: lease all machines of a group, or none."""

    group_id: str
    holder: str
    lease_ids: list[str]
    """Lease ids chosen by the client; repeating the request renews the same machines."""
    lease_s: float
    """Seconds after the last request naming a lease or the group until it is reclaimed."""
    image_digest: str = ""
    """Digest of the image layer, as in `AcquireSandbox`."""
    machine: MachineNeeds = MachineNeeds()


class GroupLeased(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: all machines of a group were leased."""

    group_id: str
    host: str
    sandboxes: list[SandboxRecord]
    """Records of the machines, in the order of the lease ids."""


class RenewGroups(Message, frozen=True, kw_only=True):
    """Client -> sandbox host: renew all groups that the client holds there."""

    group_ids: list[str]


class GroupsRenewed(Message, frozen=True, kw_only=True):
    """Sandbox host -> client: the groups were renewed, except those in `gone`."""

    gone: list[str] = []
    """Groups without machines here: released, expired, or lost when the host restarted."""


def packed_name(text: str) -> str:
    """Return a path or argument as it travels: names in a machine need not be UTF-8.

    Python keeps such bytes as lone surrogates, which the codec refuses.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return _RAW + os.fsencode(text).hex()
    return text


def unpacked_name(text: str) -> str:
    """Return what `packed_name` was given.

    Raises:
        CodecError: It is marked as bytes, and has none.

    """
    if not text.startswith(_RAW):
        return text
    try:
        return os.fsdecode(bytes.fromhex(text[1:]))
    except ValueError as error:
        raise CodecError(f"file name: expected bytes in hex: {error}") from error
