"""What machines that died had tried to reach: the proxy's record is the host's, not the guest's."""

from collections import OrderedDict
from collections.abc import Sequence

from penstock.messages.rollout import EgressAttempt

RECORDS_MAX = 1024


class LostRecords:
    """The records of machines that died in use, by lease; the oldest are forgotten."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, list[EgressAttempt]] = OrderedDict()

    def keep(self, lease_id: str, attempts: Sequence[EgressAttempt]) -> None:
        """Keep one."""
        self._records[lease_id] = list(attempts)
        if len(self._records) > RECORDS_MAX:
            self._records.popitem(last=False)

    def find(self, lease_id: str) -> list[EgressAttempt] | None:
        """Return one, None where there is none."""
        return self._records.get(lease_id)
