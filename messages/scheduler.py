"""Groups of machines on sandbox hosts: leased, released and reported as one. Not kept on a stream.

```
 asker ──PlaceGroup──▶ scheduler ──GroupPlaced (a host)──▶ asker
 asker ──AcquireGroup (all lease ids)──▶ that host ──GroupLeased (all machines)──▶ asker
 hosts ──ReportHost (groups held)──▶ scheduler, each second
```
"""

import msgspec

from penstock.messages.base import Message
from penstock.messages.rollout import SandboxRecord


class HeldGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group that has machines on the reporting host."""

    group_id: str
    holder: str
    num_machines: int
    """0: it had some since the last report, and needs its room no more."""


class AcquireGroup(Message, frozen=True, kw_only=True):
    """Asker -> the host that a placement named: lease all of a group's machines, or none."""

    group_id: str
    holder: str
    lease_ids: list[str]
    """Chosen by the asker: asking again gives the same machines, and renews them."""
    lease_s: float
    """Reaped this long after the last request that names them or their group."""
    image_digest: str = ""
    """As in `AcquireSandbox`."""


class GroupLeased(Message, frozen=True, kw_only=True):
    """The host's answer."""

    group_id: str
    host: str
    sandboxes: list[SandboxRecord]
    """In the order of the lease ids."""


class RenewGroups(Message, frozen=True, kw_only=True):
    """Asker -> a host: all that it holds there is still held; one message for all of it."""

    group_ids: list[str]


class GroupsRenewed(Message, frozen=True, kw_only=True):
    """The host's answer."""

    gone: list[str] = []
    """Groups that have no machine here: released, expired, or lost with the host's last start."""
