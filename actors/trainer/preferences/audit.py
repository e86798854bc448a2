"""Checks the corrections and judgments of manifests against the log. Pure."""

from collections.abc import Iterator

from penstock.actors.trainer.preferences.waiting import entry_of, trained_preferences
from penstock.messages.signals.preferences import (
    Label,
    PreferenceEntry,
    PreferencePair,
    preference_name,
)
from penstock.messages.training import BatchManifest


class PreferenceAudit:
    """Keeps preferences of the log until a manifest trains them."""

    def __init__(self) -> None:
        self._made: dict[str, PreferenceEntry] = {}
        self._trained: dict[str, int] = {}
        """Step by name."""

    def add(self, event: PreferencePair | Label) -> None:
        """Add a preference of the log."""
        self._made[preference_name(event)] = entry_of(event)

    def has(self, manifest: BatchManifest) -> bool:
        """Return whether all preferences that a manifest trains have been added."""
        names = {entry.name for entry in trained_preferences(manifest)}
        return names <= self._made.keys() | self._trained.keys()

    def differences(self, manifest: BatchManifest) -> Iterator[str]:
        """Yield descriptions of entries that do not match; call in the order of steps."""
        for entry in trained_preferences(manifest):
            where = f"step {manifest.step}, {entry.name}"
            # Removed once trained: what is left in memory is only what still waits.
            made = self._made.pop(entry.name, None)
            if entry.name in self._trained:
                yield f"{where}: trained in step {self._trained[entry.name]} as well"
            elif made != entry:
                yield f"{where}: {entry}, not {made}"
            self._trained[entry.name] = manifest.step
