"""Requests to place, release and report groups of machines on sandbox hosts.

```
 client ──PlaceGroup──▶ scheduler ──GroupPlaced (a host)──▶ client
 client ──AcquireGroup (all lease ids)──▶ that host ──GroupLeased (all machines)──▶ client
 hosts ──ReportHost (groups held)──▶ scheduler, each second
```
"""

import msgspec

from penstock.messages.base import Message


class HeldGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Group that has machines on the reporting host."""

    group_id: str
    holder: str
    num_machines: int
    """Number of machines now; 0 if all have ended since the last report, which frees their room."""


class PlaceGroup(Message, frozen=True, kw_only=True):
    """Rollout worker or judge -> scheduler: choose one host for all machines of a group."""

    group_id: str
    """Group id; repeating a request renews the placement, on the same host while that is up."""
    holder: str
    """Holder whose quota the group counts against."""
    num_machines: int
    image_digest: str = ""
    """Digest as in `AcquireSandbox`; hosts that have the image ready are preferred."""
    lease_s: float = 60.0
    """Seconds for which room is reserved after the last request that names the group; it also stays
    reserved while the host reports machines of the group."""
    avoid_host: str = ""
    """Host that did not answer; a group placed there is moved to another one."""
    is_grading: bool = False
    """Whether the group is for grading, as in `AcquireSandbox`."""


class GroupPlaced(Message, frozen=True, kw_only=True):
    """Scheduler -> client: the group's host."""

    group_id: str
    host: str
    """Host to acquire machines from, through its own service and with `is_placed`."""
    has_image: bool
    """Whether the host was chosen because it has the image ready."""


class ReleaseGroup(Message, frozen=True, kw_only=True):
    """Client -> scheduler: free the group's room; client -> host: end all of its machines."""

    group_id: str


class ReportHost(Message, frozen=True, kw_only=True):
    """Sandbox host -> scheduler: periodic report; a silent host gets no more groups."""

    host: str
    num_slots: int
    num_live: int
    """Number of machines in use or being started, without idle ones."""
    image_digests: list[str] = []
    """Image layers that the host has ready, limited to the most recently requested."""
    groups: list[HeldGroup] = []
    """Placed groups with machines here, from which a restarted scheduler recovers its state."""
    reserved_slots: int = 0
    """Number of slots that only grading may use."""
