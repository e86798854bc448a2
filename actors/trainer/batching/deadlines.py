"""Which groups the next step takes: earliest deadline first, and when to wait. Pure.

A group's deadline is the last policy version that may train it: its oldest token's version plus
`staleness_max`. The step that trains version v makes version v + 1. A batch may be taken when what
it leaves behind can still be trained in time (Hall's condition, over deadlines):

```
 staleness_max 2, 2 groups a batch, about to train version 1          complete   running
   deadline 2   a b | c                                               a, b       c
   deadline 3   d                                                     d
 steps left for deadline 2: the ones at versions 1 and 2, 2 groups each.
   take a, b -> left c: the step at version 2 has room              -> go, do not wait for c

 about to train version 2, complete: d, e; running: c (deadline 2)
   take d, e -> left c, with deadline 2 and no step for it any more -> wait for c
   c completes -> take c, d
```
Only groups whose first turn is on the log are seen. One whose first turn takes longer than
`staleness_max` steps is too old when it is first seen: it is discarded as stale, never trained, so
the bound holds all the same.
"""

from collections.abc import Sequence

import msgspec


class BatchCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A group as the scheduler sees it."""

    group_id: str
    group_index: int
    deadline: int
    is_complete: bool


class Room(msgspec.Struct, frozen=True, kw_only=True):
    """How many groups steps may take: over the run, at most `groups_per_batch` a version."""

    version: int
    """That the next step trains."""
    groups_per_batch: int
    num_trained: int
    """Groups of all steps so far."""

    def until(self, deadline: int) -> int:
        """Return how many groups the steps at `version`..`deadline` may take together."""
        return (deadline + 1) * self.groups_per_batch - self.num_trained


def earliest(candidates: Sequence[BatchCandidate], room: Room) -> list[BatchCandidate]:
    """Return the complete groups that the next step takes, by deadline, then by index."""
    complete = [candidate for candidate in candidates if candidate.is_complete]
    complete.sort(key=lambda candidate: (candidate.deadline, candidate.group_index))
    return complete[: max(0, room.until(room.version))]


def must_wait_for(
    candidates: Sequence[BatchCandidate], taken: Sequence[BatchCandidate], room: Room
) -> list[str]:
    """Return the running groups that could no longer be trained in time after taking `taken`.

    Args:
        candidates: all groups with a deadline >= room.version, complete or running.
        taken: what `earliest` chose.
        room: before the step.

    """
    for deadline in sorted({candidate.deadline for candidate in candidates}):
        due = [candidate for candidate in candidates if candidate.deadline <= deadline]
        num_taken = sum(candidate.deadline <= deadline for candidate in taken)
        later = room.until(deadline) - len(taken) if deadline > room.version else 0
        running = [candidate.group_id for candidate in due if not candidate.is_complete]
        is_full = num_taken == room.until(room.version)
        if len(due) - num_taken > later and running and not is_full:
            return running
    return []
