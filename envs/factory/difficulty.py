"""How hard a task is, estimated before anyone tried it.

A sum of what makes a bug hard to find and to fix, each term 0 to 1. It orders tasks; it is no
probability. Once solve rates are measured, trust those.
"""

import math

from penstock.envs.tasks.source import TaskOrigin

EASY_BELOW = 0.35
HARD_FROM = 0.6
_HINTS = {"function": 0.0, "module": 0.5, "symptom": 1.0}
_WEIGHTS = {"places": 0.25, "length": 0.25, "subtlety": 0.25, "hint": 0.25}


def difficulty_terms(origin: TaskOrigin) -> dict[str, float]:
    """Return the terms: files to search, lines to read, how seldom it shows, what is named."""
    cases = max(1, origin.num_cases)
    is_known = origin.kind != "feature" and origin.num_cases_failed > 0
    return {
        "places": min(1.0, math.log2(1 + origin.num_files) / 5),
        "length": min(1.0, origin.num_lines / 40),
        "subtlety": 1.0 - origin.num_cases_failed / cases if is_known else 0.5,
        "hint": _HINTS.get(origin.hint, 0.5),
    }


def difficulty(origin: TaskOrigin) -> float:
    """Return the estimate, 0 to 1."""
    terms = difficulty_terms(origin)
    return sum(weight * terms[name] for name, weight in _WEIGHTS.items())


def difficulty_label(origin: TaskOrigin) -> str:
    """Return easy, medium or hard."""
    value = difficulty(origin)
    return "easy" if value < EASY_BELOW else "hard" if value >= HARD_FROM else "medium"
