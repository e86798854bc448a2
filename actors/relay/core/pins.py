"""Versions that are asked for by number: evaluations under way, and where channels point. Pure."""

from penstock.messages.generation import ChannelMoved
from penstock.messages.reward import EvalAnnounced


class Pins:
    """What the log says so far."""

    def __init__(self) -> None:
        """Know of nothing."""
        self.evaluations: dict[str, int] = {}
        """Those announced and not complete -> their versions."""
        self.channels: dict[str, int] = {}
        """Channels that were moved -> where they point."""
        self._num_moves = 0

    @property
    def versions(self) -> set[int]:
        """All of them: a store keeps what leads to each."""
        return {*self.evaluations.values(), *self.channels.values()}

    def announced(self, event: EvalAnnounced) -> None:
        """Note an evaluation."""
        self.evaluations[event.eval_id] = event.policy_version

    def completed(self, eval_id: str) -> None:
        """Forget an evaluation."""
        self.evaluations.pop(eval_id, None)

    def moved(self, event: ChannelMoved) -> None:
        """Note where the channels point; of several moves the last counts."""
        if event.number >= self._num_moves:
            self._num_moves, self.channels = event.number, event.channels
