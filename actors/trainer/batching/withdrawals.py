"""Withdrawn consent: samples recorded before a withdrawal are no longer trained. Pure."""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.messages.feedback import ConsentWithdrawn

NUM_KEYS_MAX = 100_000
"""Maximum keys and tenants whose withdrawal is remembered."""


class Withdrawals:
    """The newest withdrawal of each key and tenant."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, str], ConsentWithdrawn] = OrderedDict()

    def add(self, event: ConsentWithdrawn) -> None:
        """Add a withdrawal."""
        place = (event.tenant, event.key_id)
        known = self._newest.get(place)
        if known is None or known.at < event.at:
            self._newest[place] = event
            self._newest.move_to_end(place)
        if len(self._newest) > NUM_KEYS_MAX:
            self._newest.popitem(last=False)

    def cover(self, tenant: str, key_ids: Sequence[str], recorded_at: float) -> bool:
        """Return whether a sample must not be trained; see `ConsentWithdrawn.covers`."""
        # If a sample's keys are unknown, any withdrawal of its tenant counts.
        if not key_ids:
            return any(one.covers(tenant, (), recorded_at) for one in self._newest.values())
        found = (self._newest.get((tenant, key_id)) for key_id in ("", *key_ids))
        return any(one is not None and one.covers(tenant, key_ids, recorded_at) for one in found)
