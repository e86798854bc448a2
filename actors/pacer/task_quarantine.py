"""Which training tasks are not granted any more: those whose rollouts broke process after process.

One quarantined rollout may be what its policy did; two of one task are the task's.
"""

from collections import defaultdict

from penstock.messages.control import ItemQuarantined
from penstock.messages.streams import check_token

ROLLOUTS_MAX = 2
_ITEM = "pacer.Task."


class TaskQuarantine:
    """Folds quarantined rollouts into quarantined tasks."""

    def __init__(self) -> None:
        self.task_ids: set[str] = set()
        self._rollouts: defaultdict[str, set[str]] = defaultdict(set)

    def add(self, event: ItemQuarantined) -> ItemQuarantined | None:
        """See a quarantined item; return the quarantine of its task, if that follows."""
        task_id = event.task_id
        if not task_id or event.item.startswith(_ITEM):
            return None
        rollouts = self._rollouts[task_id]
        rollouts.add(event.item.split(".", 2)[-1])  # The same in every role.
        if len(rollouts) < ROLLOUTS_MAX or task_id in self.task_ids:
            return None
        self.task_ids.add(task_id)
        name = task_id.encode().hex() if not _is_token(task_id) else task_id
        cause = f"{len(rollouts)} of its rollouts are quarantined: {', '.join(sorted(rollouts))}"
        return ItemQuarantined(item=f"{_ITEM}{name}", cause=cause, task_id=task_id)


def _is_token(text: str) -> bool:
    try:
        check_token(text, "task_id")
    except ValueError:
        return False
    return True
