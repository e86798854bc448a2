"""Machines that died under an episode, and whether the policy did it. Pure: no I/O.

A host that says `SandboxKilled` has seen a machine end, by itself, under an operation, while the
host and the other machines on it lived. Once may be chance; the episode goes on in another machine,
on another host where there is one. Twice under the same turn, or twice before the machines that one
episode may have are used up, is the policy's doing. Any other death says nothing about it.
"""

from collections import Counter

KILLS_MAX = 2
"""Machines that a policy may kill under one turn before the episode is its failure."""


class MachineDeaths:
    """Deaths under one episode."""

    def __init__(self) -> None:
        self._kills: Counter[int] = Counter()
        """Turn -> machines that it killed."""
        self.num_kills = 0
        """Machines killed, over all turns."""
        self.turn = -1
        """Turn whose calls run, or whose files are read; -1 before any of the policy's."""
        self.avoid_host = ""
        """Host of the machine killed last: the next one should be on another."""

    def add_kill(self, host: str, *, is_copy: bool) -> None:
        """Count a machine that ended under the policy's own turn.

        A copy of a saved machine runs where that was: its death is no second one elsewhere.
        """
        if self.turn >= 0:
            self.num_kills += 1
            self._kills[self.turn] += not (is_copy and self._kills[self.turn])
            self.avoid_host = host

    @property
    def is_policys(self) -> bool:
        """Whether one turn has killed machine after machine."""
        return max(self._kills.values(), default=0) >= KILLS_MAX
