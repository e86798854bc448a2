"""The browsable page of a task set: one file, no network, every task with its diff."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.factory.factory import Yield, statistics
from penstock.envs.tasks.source import TaskCandidate, difficulty, difficulty_label, difficulty_terms
from penstock.messages.task import Split

DIFF_LINES_MAX = 400
TESTS_SHOWN_MAX = 20
_PAGE = Path(__file__).with_name("page.html")
_DATA_MARK = "/*DATA*/null"


def tasks_page(candidates: Sequence[TaskCandidate], splits: dict[str, Split], counts: Yield) -> str:
    """Return the page: statistics, filters, a table, and one task's details on a click."""
    data = {
        "statistics": statistics(candidates, splits, counts),
        "tasks": [_row(one, splits[one.task.task_id]) for one in candidates],
    }
    # In a script element only `<` could end it: escaped, no task's text is ever markup.
    encoded = msgspec.json.encode(data).decode().replace("<", "\\u003c")
    return _PAGE.read_text().replace(_DATA_MARK, encoded)


def _row(candidate: TaskCandidate, split: Split) -> dict[str, Any]:
    origin = candidate.origin
    return {
        "id": candidate.task.task_id,
        "split": split.value,
        "source": origin.source,
        "repository": origin.repository,
        "kind": origin.kind,
        "change": origin.change,
        "hint": origin.hint,
        "lines": origin.num_lines,
        "files": sorted(candidate.task.files),
        "failing": f"{origin.num_cases_failed or '?'}/{origin.num_cases}",
        "difficulty": round(difficulty(origin), 2),
        "label": difficulty_label(origin),
        "terms": {name: round(value, 2) for name, value in difficulty_terms(origin).items()},
        "instruction": candidate.task.instruction,
        "diff": _diff(candidate),
        "expected": candidate.hidden.expected[:TESTS_SHOWN_MAX],
    }


def _diff(candidate: TaskCandidate) -> str:
    lines: list[str] = []
    for path, text in sorted(candidate.hidden.gold_files.items()):
        before = candidate.task.files.get(path, "").splitlines()
        lines += difflib.unified_diff(before, text.splitlines(), path, path, lineterm="")
    return "\n".join(lines[:DIFF_LINES_MAX])
