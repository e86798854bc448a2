"""Which version is the candidate, and where the channels point: what the log says. Pure.

```
            chosen ─────────▶ its channel moved ─▶ started ─────────▶ decided ─▶ stable moved
 (newest published)                                                     (only if promoted)
```
"""

from penstock.messages.gates import (
    Arm,
    CandidateChosen,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
)
from penstock.messages.generation import ChannelMoved


class Candidates:
    """The candidate that is open, if one is, and what was decided last."""

    def __init__(self) -> None:
        """Know of nothing."""
        self.chosen: CandidateChosen | None = None
        """The newest; open as long as it is not decided."""
        self.started: ExperimentStarted | None = None
        """Its experiment."""
        self.decided: ExperimentDecided | None = None
        """The newest decision."""
        self.newest = -1
        """Newest version published."""
        self.channels: dict[str, int] = {}
        self.num_moves = 0
        self._moved_for: dict[str, int] = {}
        """Channel -> the newest candidate for which it was moved."""
        self._is_overruled = False
        """Whether a person moved a channel since the candidate was chosen."""

    @property
    def is_open(self) -> bool:
        """Whether a candidate is on its way."""
        return self.chosen is not None and not self._is_decided(self.chosen.number)

    @property
    def next_number(self) -> int:
        """The number of the next candidate."""
        return self.chosen.number + 1 if self.chosen else 0

    def is_moved(self, arm: Arm, number: int) -> bool:
        """Return whether a channel was moved for a candidate."""
        return self._moved_for.get(arm.value, -1) >= number

    @property
    def promotion(self) -> ExperimentDecided | None:
        """The promotion for which `stable` is still to be moved."""
        last = self.decided
        if last is None or last.decision is not Decision.PROMOTED or self._is_overruled:
            return None
        return None if self.is_moved(Arm.STABLE, last.number) else last

    @property
    def is_overruled(self) -> bool:
        """Whether a person moved a channel while the candidate is open."""
        return self.is_open and self._is_overruled

    def published(self, policy_version: int) -> None:
        """See a version."""
        self.newest = max(self.newest, policy_version)

    def choose(self, event: CandidateChosen) -> None:
        """See a candidate."""
        if event.number >= self.next_number:
            self.chosen, self._is_overruled = event, False

    def start(self, event: ExperimentStarted) -> None:
        """See its experiment."""
        self.started = event

    def decide(self, event: ExperimentDecided) -> None:
        """See its end."""
        self.decided = event

    def moved(self, event: ChannelMoved) -> None:
        """See where channels point."""
        if event.number < self.num_moves:
            return
        self.num_moves, self.channels = event.number + 1, event.channels
        if event.candidate_number < 0:
            self._is_overruled = True
        else:
            self._moved_for[event.channel] = event.candidate_number

    def _is_decided(self, number: int) -> bool:
        return self.decided is not None and self.decided.number >= number
