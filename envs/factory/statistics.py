"""What a task set is made of, in figures."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.envs.factory.difficulty import difficulty, difficulty_label
from penstock.envs.tasks.source import TaskCandidate
from penstock.messages.task import Split

if TYPE_CHECKING:
    from penstock.envs.factory.factory import Yield


def statistics(
    candidates: Sequence[TaskCandidate], splits: dict[str, Split], counts: "Yield"
) -> dict[str, Any]:
    """Return counts by split, source, kind, change, difficulty, and the yield with its reasons."""
    origins = [one.origin for one in candidates]
    estimates = sorted(difficulty(origin) for origin in origins)
    return {
        "num_tasks": len(candidates),
        "num_repositories": len({origin.repository for origin in origins}),
        "num_functions": len({origin.digest for origin in origins}),
        "by_split": _counted(splits[one.task.task_id].value for one in candidates),
        "by_source": _counted(origin.source for origin in origins),
        "by_kind": _counted(origin.kind for origin in origins),
        "by_change": _counted(origin.change for origin in origins if origin.kind == "bug"),
        "by_difficulty": _counted(difficulty_label(origin) for origin in origins),
        "difficulty_median": round(estimates[len(estimates) // 2], 3) if estimates else None,
        "num_hidden_tests": sum(len(one.hidden.expected) for one in candidates),
        "num_plans": counts.num_plans,
        "num_candidates": counts.num_candidates,
        "tasks_per_plan": round(len(candidates) / counts.num_plans, 3)
        if counts.num_plans
        else None,
        "rejected": counts.rejected,
        "wall_s": round(counts.wall_s, 1),
    }


def _counted(values: Any) -> dict[str, int]:
    return dict(Counter(values).most_common())
