"""The newest episodes of a log, kept while it is read once, for a report that stands alone."""

import math
from collections import OrderedDict
from typing import TypeVar

import msgspec

from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.reading import EpisodeReader
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.episode import SetUpRecorded
from penstock.messages.errors import PenstockError
from penstock.messages.reading.trajectories import Last
from penstock.messages.requests.episodes import ROWS_MAX, EpisodeFilter
from penstock.messages.reward import Verdict
from penstock.messages.rollout import RolloutFinished, Turn, TurnSampled
from penstock.messages.signals.episode_labels import EpisodeLabeled

E = TypeVar("E", bound=Event)

NUM_TOKENS_MAX = 4_000_000
"""Read and sampled, of all episodes that are kept."""
REPORT_BYTES_MAX = 32 << 20
"""Of the views in a report, as JSON; packed, they take about a tenth."""


class EpisodeCollector:
    """Keeps the events of the newest episodes; a fold beside the run's own."""

    types: tuple[type[Event], ...]

    def __init__(
        self, num_episodes_max: int = ROWS_MAX, num_tokens_max: int = NUM_TOKENS_MAX
    ) -> None:
        self.index = EpisodeIndex(num_episodes_max)
        self.types = (*self.index.handlers, TurnSampled)
        self._num_tokens_max = num_tokens_max
        self._num_tokens = 0
        self._kept: OrderedDict[str, dict[tuple[type[Event], str], Event]] = OrderedDict()

    def apply(self, event: Event, at: float) -> None:
        """Keep an event that was stored at `at` (unix seconds)."""
        if handler := self.index.handlers.get(type(event)):
            handler(event, at)
        if isinstance(event, RolloutFinished | Verdict | TurnSampled | EpisodeLabeled):
            self._keep(event.rollout_id, event)

    async def packed(self, store: ObjectStore, log: Last) -> tuple[bytes, bytes]:
        """Return as JSON the rows, newest first, and an object of views by rollout id.

        Episodes that cannot be read, or that no room is left for, have a row alone.

        Args:
            store: The run's.
            log: Reads what is of a task and not of one episode.

        """

        async def last(event_type: type[E], key: str, /) -> E | None:
            if event_type is SetUpRecorded:
                return await log(event_type, key)
            rollout_id = key if event_type is RolloutFinished else key.rpartition(".")[0]
            event = self._kept.get(rollout_id, {}).get((event_type, key))
            return event if isinstance(event, event_type) else None

        reader = EpisodeReader(store, last)
        rows = self.index.select(EpisodeFilter())
        views: dict[str, msgspec.Raw] = {}
        num_bytes = 0
        for row in rows:
            if row.end is None or num_bytes > REPORT_BYTES_MAX:
                continue
            try:
                view = await reader.read(row.rollout_id, self.index)
            except PenstockError:
                continue
            views[row.rollout_id] = msgspec.Raw(
                msgspec.json.encode(msgspec.structs.replace(view, group=[]))
            )
            num_bytes += len(bytes(views[row.rollout_id]))
        return msgspec.json.encode(rows), msgspec.json.encode(views)

    def _keep(self, rollout_id: str, event: Event) -> None:
        self._kept.setdefault(rollout_id, {})[type(event), event.key()] = event
        self._num_tokens += _num_tokens(event)
        while len(self._kept) > 1 and (
            len(self._kept) > self.index.num_max or self._num_tokens > self._num_tokens_max
        ):
            _, events = self._kept.popitem(last=False)
            self._num_tokens -= sum(map(_num_tokens, events.values()))


def _num_tokens(event: Event) -> int:
    if not isinstance(event, TurnSampled) or not isinstance(event.turn, Turn):
        return 0
    return math.prod(event.turn.context_ids.shape) + math.prod(event.turn.token_ids.shape)
