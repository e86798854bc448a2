"""Groups of machines on sandbox hosts: leased, released and reported as one. Not kept on a stream.

```
 client ──PlaceGroup──▶ scheduler ──GroupPlaced (a host)──▶ client
 client ──AcquireGroup (all lease ids)──▶ that host ──GroupLeased (all machines)──▶ client
 hosts ──ReportHost (groups held)──▶ scheduler, each second
```
"""

import msgspec

from penstock.messages.base import Message


class HeldGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that has machines on the reporting host."""

    group_id: str
    holder: str
    num_machines: int
    """0: it had some since the last report, and needs no room any more."""


class PlaceGroup(Message, frozen=True, kw_only=True):
    """Rollout worker or judge -> scheduler: choose one host for all of a group."""

    group_id: str
    """A repeat gets the same host while it lives, and renews the placement."""
    holder: str
    """Holder whose quota it counts against."""
    num_machines: int
    image_digest: str = ""
    """As in `AcquireSandbox`: hosts that have it ready come first."""
    lease_s: float = 60.0
    """The room is kept this long after the last request that names the group, and as long as
    the host reports machines of it."""
    avoid_host: str = ""
    """A host that did not answer: a group placed there is placed elsewhere."""
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
    """Machines in use or being made; idle ready ones do not count."""
    image_digests: list[str] = []
    """Layers that it has ready: the most recently requested ones."""
    groups: list[HeldGroup] = []
    """Placed groups that have machines here: a scheduler that was started again adopts them."""
    reserved_slots: int = 0
    """Slots that only grading may have."""
