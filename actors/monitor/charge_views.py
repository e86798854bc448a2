"""What failed because of one item, and what is not worked on any more: a section of the page."""

import msgspec


class ChargeView(msgspec.Struct, kw_only=True):
    """An item that is not worked on any more."""

    item: str
    task_id: str
    cause: str
    at: float
    """Unix seconds."""


class ChargesView(msgspec.Struct, kw_only=True):
    """Failures charged to what was in progress."""

    num_proven: int = 0
    num_suspected: int = 0
    """Charges of items that were in progress with others."""
    num_quarantined: int = 0
    quarantined: list[ChargeView] = []
    """The newest."""
