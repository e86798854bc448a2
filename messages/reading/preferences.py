"""The account of users' corrections and judgments: each ends in exactly one manifest. Pure."""

from collections import Counter
from collections.abc import Iterable

from penstock.messages.signals.preferences import (
    Label,
    PreferenceEntry,
    PreferenceFate,
    PreferencePair,
    preference_name,
)

SKIPPED = "skipped"
"""Of a step that changed no weight."""


class PreferenceBook:
    """Folds the log, its streams in any order.

    Where a run does not train them, they wait for good.
    """

    def __init__(self) -> None:
        """Start with an empty log."""
        self._made: set[str] = set()
        self._settled: dict[str, tuple[int, PreferenceFate]] = {}
        """Name -> step and fate."""
        self._skipped: set[int] = set()
        self._faults: list[str] = []

    def add(self, event: PreferencePair | Label) -> None:
        """See one that users made."""
        self._made.add(preference_name(event))

    def settle(self, step: int, entries: Iterable[PreferenceEntry]) -> None:
        """See what a manifest lists; reading it again changes nothing."""
        for entry in entries:
            settled = (step, entry.fate)
            earlier = self._settled.setdefault(entry.name, settled)
            if earlier != settled:
                text = f"settled in step {earlier[0]} and in step {step}"
                self._faults.append(f"{entry.name}: {text}")

    def skip(self, step: int) -> None:
        """See that a step changed no weight."""
        self._skipped.add(step)

    def totals(self) -> dict[str, int]:
        """Return how many were made, and how many of them have each fate or wait."""
        fates = Counter(
            SKIPPED if step in self._skipped and fate is PreferenceFate.TRAINED else fate.value
            for step, fate in self._settled.values()
        )
        named = {fate: fates[fate] for fate in (*map(str, PreferenceFate), SKIPPED)}
        num_waiting = len(self._made - self._settled.keys())
        return {"made": len(self._made), **named, "waiting": num_waiting}

    @property
    def violations(self) -> list[str]:
        """What does not add up, in words."""
        unknown = sorted(self._settled.keys() - self._made)
        return [*self._faults, *(f"{name}: in a manifest, and nobody made it" for name in unknown)]
