"""Demonstrates trails: one who reads stop after stop, and whose summaries leave names out.

The walker's memory is what the context has: after a summary it knows what it wrote and no more. So
the policy that imitates it has seen how to carry everything, and how it goes wrong.
"""

import random

from penstock import ToolCall

from .config import TrailHabits
from .tasks import ANSWER_FILE, END, NEXT, NUMBERS, Trail, numbered_names


class Walker:
    """Walks one trail.

    Example:
        walker.calls() reads `b4/1`; walker.see(["... one olga next d2"]); walker.summary() is
        `names one olga next d2`, or `names next d2` where the name is left out.

    """

    def __init__(self, trail: Trail, habits: TrailHabits, rng: random.Random) -> None:
        self._trail, self._habits, self._rng = trail, habits, rng
        self._names: dict[str, str] = {}
        """By number."""
        self._stop = trail.stops[0]
        """Where to go next; empty at the end."""

    def calls(self) -> list[ToolCall]:
        """Return what the walker calls now."""
        if self._stop:
            return [
                ToolCall(name="read_file", arguments={"path": path})
                for path in self._trail.paths(self._stop)
            ]
        answer = {"path": ANSWER_FILE, "content": numbered_names(self._names)}
        return [
            ToolCall(name="write_file", arguments=answer),
            ToolCall(name="finish", arguments={}),
        ]

    def see(self, texts: list[str]) -> None:
        """Read what the calls returned."""
        words = " ".join(texts).split()
        for word, value in zip(words, [*words[1:], ""], strict=True):
            if word in NUMBERS:
                self._names[word] = value
            elif word in {NEXT, END}:
                self._stop = value if word == NEXT else ""

    def summary(self) -> str:
        """Return what the walker notes, and forget the rest."""
        if self._names and self._rng.random() < self._habits.drops:
            del self._names[self._rng.choice(sorted(self._names))]
        place = [NEXT, self._stop] if self._stop else [END]
        return " ".join([numbered_names(self._names), *place])
