"""Requests to sandbox hosts: request and reply, not kept on a stream."""

from penstock.messages.base import Message
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.task import MachineNeeds


class AcquireSandbox(Message, frozen=True, kw_only=True):
    """Rollout worker or judge -> any sandbox host with room."""

    lease_id: str
    """Chosen by the client: a repeat gets the same machine."""
    holder: str
    lease_s: float
    """Reaped this long after the last request that names the lease."""
    is_placed: bool = False
    """Sent to the host that a placement named, which then grants the lease if there is none."""
    checkpoint_id: str = ""
    """Start from this checkpoint of the host; sent to it, with `is_placed`."""
    group_id: str = ""
    """The placed group that it belongs to: the host reports it as held."""
    image_digest: str = ""
    """Image layer above the base image; empty: the host's own choice for all."""
    machine: MachineNeeds = MachineNeeds()
    """What it must have; by default what the host's pool gives."""
    is_grading: bool = False
    """It may use the slots that hosts reserve for grading, so that finished rollouts are graded."""
    avoid_host: str = ""
    """Host that is to leave this to others."""
    takes_over: bool = False
    """End what the holder leased from this host before: who did so may be gone."""


class SandboxLeased(Message, frozen=True, kw_only=True):
    """Sandbox host -> client."""

    lease_id: str
    host: str
    """Further requests of this lease go to this host."""
    sandbox: SandboxRecord


class ExecCommand(Message, frozen=True, kw_only=True):
    """Run a program in a leased machine."""

    lease_id: str
    op_key: str
    """A repeat with the same key does not run it again."""
    argv: list[str]
    cwd: str = "/work"
    env: dict[str, str] = {}
    timeout_s: float = 10.0
    output_bytes_max: int = 65536
    peer: list[str] = []
    """The code under test, which another user runs beside `argv` (`envs.sandbox.VerifierRun`)."""
    covers: list[tuple[str, str]] = []


class ExecResult(Message, frozen=True, kw_only=True):
    """How a program ended."""

    exit_code: int
    """Negative signal number if a signal ended it."""
    stdout: bytes = b""
    """The first `output_bytes_max` bytes; `stderr` likewise."""
    stderr: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    """Its process group was killed at the deadline."""
    duration_ms: float = 0.0
    starved_ms: float = 0.0
    """Of that, how long programs of the machine's host waited for a processor."""


class ReadFile(Message, frozen=True, kw_only=True):
    """Read one file of a leased machine."""

    lease_id: str
    path: str
    num_bytes_max: int


class FileRead(Message, frozen=True, kw_only=True):
    """The file's bytes."""

    data: bytes


class WriteFiles(Message, frozen=True, kw_only=True):
    """Write files into a leased machine, parents included."""

    lease_id: str
    files: dict[str, bytes]
    is_verifier: bool = False
    """They are the verifier's: the code under test cannot read them."""


class ListFiles(Message, frozen=True, kw_only=True):
    """List regular files below `root`, recursively."""

    lease_id: str
    root: str


class FilesListed(Message, frozen=True, kw_only=True):
    """Paths relative to the requested root, sorted."""

    paths: list[str]


class AllowEgress(Message, frozen=True, kw_only=True):
    """Let the programs of a leased machine reach some hosts through the audited proxy."""

    lease_id: str
    rules: list[str]
    """As `Task.egress`; a repeat with the same ones changes nothing."""


class ReadEgress(Message, frozen=True, kw_only=True):
    """Read what the programs of a leased machine tried to reach."""

    lease_id: str


class EgressRead(Message, frozen=True, kw_only=True):
    """Attempts in the order of their ends, then those still open."""

    attempts: list[EgressAttempt]


class ReleaseSandbox(Message, frozen=True, kw_only=True):
    """Release the machine; it is destroyed."""

    lease_id: str


class SaveSandbox(Message, frozen=True, kw_only=True):
    """Save a leased machine while it runs; it keeps running."""

    lease_id: str
    checkpoint_id: str
    """Chosen by the client: a repeat does not save again."""


class SandboxSaved(Message, frozen=True, kw_only=True):
    """The machine's state is on the host's disk; any number of machines may start from it."""

    checkpoint_id: str
    host: str


class AcquireGroup(Message, frozen=True, kw_only=True):
    """Client -> the host that a placement named: lease all of a group's machines, or none."""

    group_id: str
    holder: str
    lease_ids: list[str]
    """Chosen by the client: a repeat gets the same machines, and renews them."""
    lease_s: float
    """Reaped this long after the last request that names them or their group."""
    image_digest: str = ""
    """As in `AcquireSandbox`."""
    machine: MachineNeeds = MachineNeeds()


class GroupLeased(Message, frozen=True, kw_only=True):
    """The host's answer."""

    group_id: str
    host: str
    sandboxes: list[SandboxRecord]
    """In the order of the lease ids."""


class RenewGroups(Message, frozen=True, kw_only=True):
    """Client -> a host: all that it holds there is still held; one message for all of it."""

    group_ids: list[str]


class GroupsRenewed(Message, frozen=True, kw_only=True):
    """The host's answer."""

    gone: list[str] = []
    """Groups that have no machine here: released, expired, or lost with the host's last start."""
