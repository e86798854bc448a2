"""What the scheduler knows of a host and of a group's room."""

import msgspec


class Host(msgspec.Struct):
    """A sandbox host, as the scheduler sees it."""

    name: str
    num_slots: int = 0
    reserved_slots: int = 0
    """Of the slots, those that only grading may have."""
    num_others: int = 0
    """Machines of no group that is placed here, as it last reported: a judge's, say."""
    num_placed: int = 0
    """Of groups that are placed here."""
    seen_at: float = 0.0
    is_silent: bool = False
    """Somebody had no answer from it since it last reported: nothing new is placed here."""
    images: set[str] = msgspec.field(default_factory=set[str])
    groups: set[str] = msgspec.field(default_factory=set[str])
    """Ids of the groups that are placed here."""

    @property
    def load(self) -> int:
        """Machines that it has or will have."""
        return self.num_others + self.num_placed

    @property
    def fill(self) -> float:
        """Load as a fraction of what it can hold."""
        return self.load / self.num_slots if self.num_slots else 1.0

    def has_room(self, num_machines: int, *, is_grading: bool) -> bool:
        """Return whether a group fits; what is not grading may fill an empty host alone."""
        reserved = 0 if is_grading or not self.load else self.reserved_slots
        return not self.is_silent and self.load + num_machines + reserved <= self.num_slots


class Placement(msgspec.Struct):
    """Room that a group has: kept for its lease's time, then as long as its host reports it."""

    host: str
    holder: str
    num_machines: int
    lease_s: float
    has_image: bool
    expires_at: float = 0.0
    image: str = ""
    is_held: bool = False
    """Its host has reported machines of it."""
