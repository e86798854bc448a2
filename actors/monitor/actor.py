"""The monitor as an actor: follows all streams; answers for the run's state and its episodes."""

from collections.abc import AsyncIterator, Mapping

from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.monitor.episodes.service import EpisodeService
from penstock.actors.monitor.exposition import exposition
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import encode_state
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Message
from penstock.messages.bus import Bus, Serve
from penstock.messages.telemetry import MonitorSnapshot, ReadMonitor


class Monitor(Actor):
    """Follows the log without handlers, since it needs the time at which each event was stored."""

    role = "monitor"

    def __init__(self, bus: Bus) -> None:
        """Take the bus to follow."""
        self._bus = bus
        self._fold = RunFold()
        self._index = EpisodeIndex()
        self._episodes: EpisodeService | None = None
        self._ctx: Context | None = None

    def services(self) -> Mapping[str, Serve]:
        """Serve the state of the run, and its episodes."""
        return {
            "monitor.state": self._read,
            "monitor.episodes": self._list_episodes,
            "monitor.episode": self._read_episode,
        }

    async def start(self, ctx: Context) -> Effects:
        """Start following the log."""
        self._ctx = ctx
        self._episodes = EpisodeService(self._index, ctx)
        ctx.spawn("follow", self._follow())
        return ()

    async def _follow(self) -> None:
        async for delivery in self._bus.follow([*{*self._fold.types, *self._index.handlers}]):
            self._fold.apply(delivery.event, delivery.stored_at)
            if handler := self._index.handlers.get(type(delivery.event)):
                handler(delivery.event, delivery.stored_at)

    def _list_episodes(self, message: Message) -> AsyncIterator[Message]:
        assert self._episodes is not None, "the monitor has not started"
        return self._episodes.list(message)

    def _read_episode(self, message: Message) -> AsyncIterator[Message]:
        assert self._episodes is not None, "the monitor has not started"
        return self._episodes.read(message)

    async def _read(self, message: Message) -> AsyncIterator[Message]:
        assert isinstance(message, ReadMonitor)
        assert self._ctx is not None, "the monitor has not started"
        state = self._fold.state(self._ctx.now())
        yield MonitorSnapshot(state_json=encode_state(state), exposition=exposition(state))
