"""How a machine is asked for and held."""

import msgspec


class SavedSandbox(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint, and where it is."""

    checkpoint_id: str
    host: str


class GroupSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The group that a machine belongs to: all of its machines are placed on one host."""

    group_id: str
    num_machines: int
    holder: str = ""
    """Whose quota it counts against; empty: the machine's own holder."""


class LeaseSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a machine is asked for and held."""

    holder: str
    lease_s: float = 60.0
    """The host reaps the machine this long after the last request."""
    acquire_wait_s: float = 120.0
    """Longest wait for a host with room."""
    image_digest: str = ""
    """Image layer above the base image; empty: the host's own choice for all."""
    retry_delay_s: float = 0.2
    margin_s: float = 10.0
    """Time that a host has to answer, on top of what the operation itself may take."""
    group: GroupSpec | None = None
    """Ask the scheduler for a host; else any host with room answers."""
    is_grading: bool = False
    """It may use the slots that hosts reserve for grading."""
    takes_over: bool = False
    """End the machine that the same holder leased before."""
    branch_of: SavedSandbox | None = None
    """Go on from a checkpoint, on the host that holds it."""
