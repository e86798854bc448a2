"""Which replicas are there, by their own reports, and which of them a request goes to.

```
 ReplicaReported ─▶ known ── silent for SILENT_S, left, or started again ─▶ its requests are lost
                      │
   serves the purpose, on the channel
                      ▼
   the session's own, unless it is full or was asked in vain ─▶ else the least loaded
```
A session's own replica is where `place` put it, the least loaded one when it began; of a session
that nobody placed here, the one that its name prefers, which every client finds alike.

Session affinity: every client sends a session to the same replica, and none keeps a table.

Rendezvous hashing: of all replicas, the one whose hash with the session is the highest. A replica
that leaves moves its own sessions alone, evenly to the others; one that joins takes only what
becomes its own. Source: Thaler and Ravishankar, Using name-based mappings to increase hit rates,
1998.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from hashlib import blake2b

from penstock.messages.generation import ReplicaReported, pinned_version
from penstock.messages.task import Purpose


def preferred(session_id: str, replicas: Iterable[str]) -> str | None:
    """Return the replica that a session belongs to, or None if there is none."""
    return max(replicas, key=lambda replica: (_score(session_id, replica), replica), default=None)


def _score(session_id: str, replica: str) -> bytes:
    return blake2b(f"{replica}\0{session_id}".encode(), digest_size=8).digest()


SILENT_S = 10.0
"""A replica that has not reported for so long is not counted, and what it was asked is lost."""
SESSIONS_MAX = 65_536
"""Placed sessions that are remembered; the ones used longest ago belong by their names again."""


class Replica:
    """One replica, and the requests that this process has at it."""

    def __init__(self, report: ReplicaReported, now: float) -> None:
        self.report = report
        self.seen_at = now
        self.uses: dict[asyncio.Future[None], None] = {}
        """Each is done when its request is lost."""
        self.num_sessions = 0
        """Placed here and not over: those between two turns load it soon again."""

    @property
    def load(self) -> float:
        """Requests over those that run at once; those of this process may be newer."""
        return max(self.report.num_requests, len(self.uses)) / self.report.num_running_max

    @property
    def pressure(self) -> float:
        """Its load, and that of the sessions that this process has placed there."""
        return self.load + self.num_sessions / self.report.num_running_max

    def lose(self) -> None:
        """Tell those who wait for an answer that none will come."""
        for use in self.uses:
            if not use.done():
                use.set_result(None)


class ReplicaTable:
    """The replicas that reported lately; times are of one clock that never goes back."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Placed session -> its replica; the one used last comes last."""
        self._changed = asyncio.Event()

    def add(self, report: ReplicaReported, now: float) -> None:
        """Take a report; the requests at a replica that started again or leaves are lost."""
        known = self._replicas.get(report.replica)
        if known is not None:
            if report.started_at < known.report.started_at:
                return
            if report.started_at > known.report.started_at or report.is_leaving:
                known.lose()
        if report.is_leaving:
            self._remove(report.replica)
        elif known is None:
            self._replicas[report.replica] = Replica(report, now)
        else:
            known.report, known.seen_at = report, now
        self._changed.set()

    def expire(self, now: float) -> None:
        """Drop the replicas that have been silent for too long."""
        for name, replica in list(self._replicas.items()):
            if now - replica.seen_at > SILENT_S:
                replica.lose()
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Forget a replica; its sessions are placed again, or belong by their names."""
        if self._replicas.pop(name, None) is not None:
            kept = ((session, home) for session, home in self._homes.items() if home != name)
            self._homes = OrderedDict(kept)

    def ready(self, purpose: Purpose, channel: str | None = None) -> list[ReplicaReported]:
        """Return the replicas that serve a purpose, on a channel if one is named.

        Raises:
            ConfigError: No such channel.

        """
        version = None if channel is None else pinned_version(channel)
        reports = [one.report for one in self._replicas.values() if purpose in one.report.serves]
        if version is not None:
            return [one for one in reports if one.policy_version == version]
        return [one for one in reports if channel in {None, one.channel}]

    def place(self, session_id: str, purpose: Purpose, channel: str) -> None:
        """Have a session that begins go to the least loaded replica, and stay there.

        One that is placed already stays where it is, unless its replica is gone.

        Args:
            session_id: One that no other client continues: they would look for it by its name.
            purpose: What its requests are for.
            channel: Which versions may answer them.

        """
        names = [one.replica for one in self.ready(purpose, channel)]
        if self._homes.get(session_id) in names:
            self._homes.move_to_end(session_id)
            return
        self.leave(session_id)
        if not names:
            return
        least = min(self._replicas[name].pressure for name in names)
        fewest = [name for name in names if self._replicas[name].pressure == least]
        home = preferred(session_id, fewest)
        assert home is not None
        self._homes[session_id] = home
        self._replicas[home].num_sessions += 1
        if len(self._homes) > SESSIONS_MAX:
            self.leave(next(iter(self._homes)))

    def leave(self, session_id: str) -> None:
        """Forget a session that is over, or that was never placed."""
        home = self._replicas.get(self._homes.pop(session_id, ""))
        if home is not None:
            home.num_sessions -= 1

    def choose(
        self, session_id: str, purpose: Purpose, channel: str, asked: Collection[str] = ()
    ) -> str | None:
        """Return the replica to ask: the session's own if it has room, else the least loaded.

        Args:
            session_id: Its turns go to one replica, which has their prefix cached.
            purpose: What the request is for.
            channel: Which versions may answer it.
            asked: Replicas that were asked in vain; asked again only where there is no other.

        """
        names = [one.replica for one in self.ready(purpose, channel)]
        left = [name for name in names if name not in asked] or names
        home = self._homes.get(session_id)
        own = home if home in names else preferred(session_id, names)
        with_room = [name for name in left if self._replicas[name].load < 1.0]
        if own is None or (own in left and (own in with_room or not with_room)):
            return own
        least = min(self._replicas[name].load for name in left)
        return preferred(session_id, [n for n in left if self._replicas[n].load == least])

    async def chosen(
        self, session_id: str, purpose: Purpose, channel: str, asked: Collection[str] = ()
    ) -> str:
        """Return `choose`'s replica as soon as there is one; the caller bounds the wait."""
        while (name := self.choose(session_id, purpose, channel, asked)) is None:
            self._changed.clear()
            await self._changed.wait()
        return name

    @contextmanager
    def using(self, name: str) -> Generator[asyncio.Future[None]]:
        """Count a request at a replica; yields what is done when the request is lost."""
        replica = self._replicas[name]
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replica.uses[lost] = None
        try:
            yield lost
        finally:
            del replica.uses[lost]
