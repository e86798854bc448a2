"""Versions that must stay available: those of running evaluations and of channels. Pure."""

from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalAnnounced


class Pins:
    """Versions pinned by the events of the log so far."""

    def __init__(self) -> None:
        """Start without pins."""
        self.evaluations: dict[str, int] = {}
        """Announced and uncompleted evaluation -> version."""
        self.channels: dict[str, int] = {}
        """Channel that was moved -> version."""
        self._num_moves = 0

    @property
    def versions(self) -> set[int]:
        """All pinned versions; a store keeps the updates that lead to them."""
        return {*self.evaluations.values(), *self.channels.values()}

    def announced(self, event: EvalAnnounced) -> None:
        """Pin the version of an evaluation."""
        self.evaluations[event.eval_id] = event.policy_version

    def completed(self, eval_id: str) -> None:
        """Unpin the version of an evaluation."""
        self.evaluations.pop(eval_id, None)

    def moved(self, event: ChannelMoved) -> None:
        """Pin the versions that the channels point to."""
        # Moves are numbered, and may be delivered again after a newer one.
        if event.number >= self._num_moves:
            self._num_moves, self.channels = event.number, event.channels
