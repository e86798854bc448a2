"""The weights of earlier versions that training still compares with."""

from collections.abc import Callable, Mapping

import torch

from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE

Weights = Mapping[str, torch.Tensor]
"""By parameter; those that only mid-training uses are not among them."""

_PREFIX = "version."


def published(weights: Weights) -> Weights:
    """Return a copy, rounded as generators get it."""
    return {name: value.detach().to(PUBLISHED_DTYPE, copy=True) for name, value in weights.items()}


class EarlierVersions:
    """The reference, and the newest versions before the current one."""

    def __init__(self) -> None:
        """Keep nothing yet."""
        self.reference: Weights | None = None
        """Version 0."""
        self.recent: dict[int, Weights] = {}
        """Version -> weights, oldest first."""
        self.have_sampled = True
        """Whether versions are those that the log's tokens came from; not where training leaves the
        run's own path, so that nothing can be said of the engine."""

    def keep(self, version: int, weights: Weights, num_kept: int) -> None:
        """Add the version that a step has just left behind, and drop the oldest above the bound."""
        self.recent[version] = weights
        for old in sorted(self.recent)[: len(self.recent) - num_kept]:
            del self.recent[old]

    def state(self) -> dict[str, torch.Tensor]:
        """Return the recent ones, for a checkpoint."""
        return {
            f"{_PREFIX}{version}.{name}": value
            for version, weights in self.recent.items()
            for name, value in weights.items()
        }

    def load_state(
        self, state: Weights, placed: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        """Take over the recent ones of a checkpoint, and no others; `placed` copies a tensor."""
        found: dict[int, dict[str, torch.Tensor]] = {}
        for key, value in state.items():
            if key.startswith(_PREFIX):
                version, _, name = key.removeprefix(_PREFIX).partition(".")
                found.setdefault(int(version), {})[name] = placed(name, value)
        self.recent = {version: found[version] for version in sorted(found)}
