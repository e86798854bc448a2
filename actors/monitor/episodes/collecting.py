"""Collects the newest episodes during one pass over a log, for a self-contained report."""

import logging
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

log = logging.getLogger(__name__)

E = TypeVar("E", bound=Event)

NUM_TOKENS_MAX = 4_000_000
"""Largest number of tokens, read and sampled, over all kept episodes."""
REPORT_BYTES_MAX = 32 << 20
"""Size of the views in a report, as JSON, after which no more are added; compression reduces it to
about a tenth."""


class EpisodeCollector:
    """Keeper of the events of the newest episodes; runs next to the fold of the run's state."""

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
        """Apply an event that was stored at `at` (Unix seconds)."""
        if handler := self.index.handlers.get(type(event)):
            handler(event, at)
        if isinstance(event, RolloutFinished | Verdict | TurnSampled | EpisodeLabeled):
            self._keep(event.rollout_id, event)

    async def packed(self, store: ObjectStore, read_last: Last) -> tuple[bytes, bytes]:
        """Return two JSON documents: the rows, newest first, and the views by rollout id.

        Episodes that cannot be read, or that exceed `REPORT_BYTES_MAX`, have a row but no view.

        Args:
            store: Object store of the run.
            read_last: Reader of the newest event, for events of a task instead of an episode.

        """

        async def last(event_type: type[E], key: str, /) -> E | None:
            if event_type is SetUpRecorded:
                return await read_last(event_type, key)
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
            except PenstockError as error:
                log.warning("episode %s left out of the report: %s", row.rollout_id, error)
                continue
            # Without the group: each view would repeat the rows of all its siblings.
            views[row.rollout_id] = msgspec.Raw(
                msgspec.json.encode(msgspec.structs.replace(view, group=[]))
            )
            num_bytes += len(bytes(views[row.rollout_id]))
        return msgspec.json.encode(rows), msgspec.json.encode(views)

    def _keep(self, rollout_id: str, event: Event) -> None:
        self._kept.setdefault(rollout_id, {})[type(event), event.key()] = event
        self._num_tokens += _num_tokens(event)
        # The newest episode stays even if it exceeds the limit by itself.
        while len(self._kept) > 1 and (
            len(self._kept) > self.index.num_max or self._num_tokens > self._num_tokens_max
        ):
            _, events = self._kept.popitem(last=False)
            self._num_tokens -= sum(map(_num_tokens, events.values()))


def _num_tokens(event: Event) -> int:
    if not isinstance(event, TurnSampled) or not isinstance(event.turn, Turn):
        return 0
    return math.prod(event.turn.context_ids.shape) + math.prod(event.turn.token_ids.shape)
