"""View of failures charged to work items, and of quarantined items: a section of the page."""

import msgspec


class ChargeView(msgspec.Struct, kw_only=True):
    """A quarantined item, which is not retried."""

    item: str
    task_id: str
    cause: str
    at: float
    """Time of the quarantine, Unix seconds."""


class ChargesView(msgspec.Struct, kw_only=True):
    """Failures charged to the items that were in progress."""

    num_proven: int = 0
    """Number of charges of items that were in progress when nothing else was."""
    num_suspected: int = 0
    """Number of charges of items that were in progress together with others."""
    num_quarantined: int = 0
    quarantined: list[ChargeView] = []
    """Newest quarantined items."""
