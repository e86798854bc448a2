"""Recomputes what a manifest says of corrections and judgments. Pure."""

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
    """Holds them until the manifests that train them."""

    def __init__(self) -> None:
        """Start with an empty log."""
        self._made: dict[str, PreferenceEntry] = {}
        self._trained: dict[str, int] = {}
        """Name -> step."""

    def add(self, event: PreferencePair | Label) -> None:
        """Keep one."""
        self._made[preference_name(event)] = entry_of(event)

    def has(self, manifest: BatchManifest) -> bool:
        """Whether the log has shown all that the manifest trains."""
        names = {entry.name for entry in trained_preferences(manifest)}
        return names <= self._made.keys() | self._trained.keys()

    def differences(self, manifest: BatchManifest) -> Iterator[str]:
        """Yield what does not follow from the log, in words; manifests in the order of steps."""
        for entry in trained_preferences(manifest):
            where = f"step {manifest.step}, {entry.name}"
            made = self._made.pop(entry.name, None)
            if entry.name in self._trained:
                yield f"{where}: trained in step {self._trained[entry.name]} as well"
            elif made != entry:
                yield f"{where}: {entry}, not {made}"
            self._trained[entry.name] = manifest.step
