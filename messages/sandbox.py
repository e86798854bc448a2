"""Requests to sandbox hosts: request and reply, not kept on a stream."""

from penstock.messages.base import Message
from penstock.messages.rollout import EgressAttempt, SandboxRecord
from penstock.messages.scheduler import HeldGroup


class AcquireSandbox(Message, frozen=True, kw_only=True):
    """Rollout worker or judge -> any sandbox host with room."""

    lease_id: str
    """Chosen by the asker: asking twice gives the same machine."""
    holder: str
    lease_s: float
    """Reaped this long after the last request that names the lease."""
    is_placed: bool = False
    """Sent to the host that a placement named: it gives the lease, where else it would renew it."""
    checkpoint_id: str = ""
    """Go on from this checkpoint of the host; sent to it, with `is_placed`."""
    group_id: str = ""
    """The placed group that it belongs to: the host reports it as held."""
    image_digest: str = ""
    """Image layer above the base image; empty: the host's own choice for all."""
    is_grading: bool = False
    """It may have a machine that hosts keep from rollouts, so that what they did is graded."""
    takes_over: bool = False
    """End what the holder leased from this host before: who did so may be gone."""


class SandboxLeased(Message, frozen=True, kw_only=True):
    """Sandbox host -> asker."""

    lease_id: str
    host: str
    """Further requests of this lease go to this host."""
    sandbox: SandboxRecord


class ExecCommand(Message, frozen=True, kw_only=True):
    """Run a program in a leased machine."""

    lease_id: str
    op_key: str
    """Asking twice with one key runs it once."""
    argv: list[str]
    cwd: str = "/work"
    env: dict[str, str] = {}
    timeout_s: float = 10.0
    output_bytes_max: int = 65536


class CommandFinished(Message, frozen=True, kw_only=True):
    """The program's end."""

    exit_code: int
    stdout: bytes = b""
    stderr: bytes = b""
    truncated: bool = False
    timed_out: bool = False
    duration_ms: float = 0.0


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


class ListFiles(Message, frozen=True, kw_only=True):
    """List regular files below `root`, recursively."""

    lease_id: str
    root: str


class FilesListed(Message, frozen=True, kw_only=True):
    """Paths relative to the asked root, sorted."""

    paths: list[str]


class AllowEgress(Message, frozen=True, kw_only=True):
    """Let the programs of a leased machine reach some hosts through the audited proxy."""

    lease_id: str
    rules: list[str]
    """As `Task.egress`; asking again for the same ones changes nothing."""


class ReadEgress(Message, frozen=True, kw_only=True):
    """Ask what the programs of a leased machine tried to reach."""

    lease_id: str


class EgressRead(Message, frozen=True, kw_only=True):
    """Attempts in the order of their ends, then those still open."""

    attempts: list[EgressAttempt]


class ReleaseSandbox(Message, frozen=True, kw_only=True):
    """Give the machine back; it is destroyed."""

    lease_id: str


class PlaceGroup(Message, frozen=True, kw_only=True):
    """Whoever needs machines -> the fleet's scheduler: choose one host for all of a group."""

    group_id: str
    """Asking again gives the same host, as long as it lives, and renews the placement."""
    holder: str
    """Whose quota it counts against."""
    num_machines: int
    image_digest: str = ""
    """As in `AcquireSandbox`: hosts that have it ready come first."""
    lease_s: float = 60.0
    """The room is kept this long after the last request that names the group, and as long as
    the host reports machines of it."""
    avoid_host: str = ""
    """A host that did not answer: a group placed there is placed anew, elsewhere."""
    is_grading: bool = False
    """As in `AcquireSandbox`."""


class GroupPlaced(Message, frozen=True, kw_only=True):
    """The scheduler's answer."""

    group_id: str
    host: str
    """Acquire from this host's own service, with `is_placed`."""
    has_image: bool
    """Whether the host was chosen for holding the image already."""


class ReleaseGroup(Message, frozen=True, kw_only=True):
    """To the scheduler: the group needs no room any more. To a host: end all machines of it."""

    group_id: str


class ReportHost(Message, frozen=True, kw_only=True):
    """Sandbox host -> scheduler, periodically; a host that falls silent gets nothing more."""

    host: str
    num_slots: int
    num_live: int
    """Machines in use or on the way; ready ones that nobody has yet do not count."""
    image_digests: list[str] = []
    """Layers that it has ready: those asked for last."""
    groups: list[HeldGroup] = []
    """Placed groups that have machines here: a scheduler that was started again adopts them."""
    num_spared: int = 0
    """Slots that only grading may have."""


class SaveSandbox(Message, frozen=True, kw_only=True):
    """Save a leased machine while it runs; it goes on."""

    lease_id: str
    checkpoint_id: str
    """Chosen by the asker: asking twice saves once."""


class SandboxSaved(Message, frozen=True, kw_only=True):
    """The machine's state is on the host's disk; any number of machines may go on from it."""

    checkpoint_id: str
    host: str
