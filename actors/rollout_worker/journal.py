"""What the log has of an episode: its turns, and the states that were saved.

```
 turn       0    1    2    3    4         stored as
 trunk      t0   t1   t2   t3   t4        <trunk>.0 .. <trunk>.4
 branch               b2   b3             <trunk>.0, <trunk>.1, <branch>.2, <branch>.3
```
A branch shares its trunk's first turns and states; what it adds bears its own name. So every
sampled token is stored, and counted, once.
"""

from penstock.actors.runtime.context import Context
from penstock.messages.rollout import EpisodeSaved, Trunk, Turn, TurnSampled
from penstock.messages.task import StartRollout


class Journal:
    """Reads and writes one episode's record."""

    def __init__(self, ctx: Context, command: StartRollout, trunk: Trunk | None) -> None:
        self._ctx = ctx
        self._command = command
        self._trunk = trunk

    @property
    def num_trunk_turns(self) -> int:
        """Turns that are another rollout's."""
        return self._trunk.num_turns if self._trunk else 0

    async def turns(self, first: int = 0) -> list[Turn]:
        """Return the stored turns from an index on, as far as they go."""
        turns: list[Turn] = []
        for index in range(first, self._command.task.limits.num_turns_max):
            event = await self._ctx.last(TurnSampled, f"{self._owner(index)}.{index}")
            if event is None:
                break
            turns.append(event.turn)
        return turns

    async def add(self, index: int, turn: Turn) -> list[Turn]:
        """Store a turn; where another incarnation stored it first, return its turns from there."""
        command = self._command
        [receipt] = await self._ctx.publish(
            TurnSampled(
                rollout_id=command.rollout_id,
                group_id=command.group_id,
                purpose=command.purpose,
                turn_index=index,
                turn=turn,
            )
        )
        return await self.turns(index) if receipt.is_duplicate else [turn]

    async def saved_after(self, num_turns: int) -> EpisodeSaved | None:
        """Return the state after that many turns, if it was saved."""
        owner = self._owner(num_turns - 1)
        return await self._ctx.last(EpisodeSaved, f"{owner}.{num_turns}")

    async def newest_saved(self, num_turns: int, *, above: int) -> EpisodeSaved | None:
        """Return the newest saved state within the first `num_turns` turns, after `above`."""
        for count in range(num_turns, above, -1):
            saved = await self.saved_after(count)
            if saved is not None:
                return saved
        return None

    def _owner(self, index: int) -> str:
        """Return the rollout whose turn this is."""
        if self._trunk is not None and index < self._trunk.num_turns:
            return self._trunk.rollout_id
        return self._command.rollout_id
