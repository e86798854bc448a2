"""Turns of finished rollouts and live samples, kept until they are trained or left out."""

from collections.abc import Iterable, Sequence

from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.messages.rollout import Turn
from penstock.messages.training import BatchManifest, SampleEntry


class TurnStore:
    """Turns by rollout or request id; trajectories and manifests may come in either order."""

    def __init__(self) -> None:
        self._turns: dict[str, Sequence[Turn]] = {}
        self._done: set[str] = set()

    def add(self, rollout_id: str, turns: Sequence[Turn]) -> None:
        """Keep the turns, unless their sample is done with."""
        if rollout_id not in self._done:
            self._turns[rollout_id] = turns

    def has(self, manifest: BatchManifest) -> bool:
        """Whether all that the manifest trains is here."""
        return all(sample.rollout_id in self._turns for sample in trained_samples(manifest))

    def of(self, manifest: BatchManifest) -> dict[str, Sequence[Turn]]:
        """Return the turns of what the manifest trains."""
        names = [sample.rollout_id for sample in trained_samples(manifest)]
        return {name: self._turns[name] for name in names}

    def drop(self, manifest: BatchManifest) -> None:
        """Forget all of a manifest's samples."""
        for sample in _samples(manifest):
            self._turns.pop(sample.rollout_id, None)
            self._done.add(sample.rollout_id)

    def __len__(self) -> int:
        """Return the number of samples kept."""
        return len(self._turns)


def _samples(manifest: BatchManifest) -> Iterable[SampleEntry]:
    for group in (*manifest.groups, *manifest.discarded):
        yield from group.samples
    yield from manifest.live
