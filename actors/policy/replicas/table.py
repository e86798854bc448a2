"""Table of the known replicas, which chooses the replica for each request.

```
 ReplicaReported ─▶ known ── silent for SILENT_S, left, or restarted ─▶ its requests are lost
                      │
   serves the purpose, on the channel
                      ▼
   home of the session, unless it is full or has failed already ─▶ else the least loaded
```
The home of a session is the replica where its prefix is cached. `place` puts a new session on the
least loaded replica. For a session that this process did not place, rendezvous hashing finds the
home, so that all clients choose the same replica without sharing a table.

Rendezvous hashing takes the replica with the highest hash together with the session id. When a
replica leaves, only its own sessions move, evenly to the others; when one joins, only the sessions
that now belong to it move. Source: Thaler and Ravishankar, Using name-based mappings to increase
hit rates, 1998.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Collection, Generator, Iterable
from contextlib import contextmanager
from hashlib import blake2b

from penstock.messages.generation import ReplicaReported, pinned_version
from penstock.messages.task import Purpose

log = logging.getLogger(__name__)


def preferred(session_id: str, replicas: Iterable[str]) -> str | None:
    """Return the replica with the highest hash for a session, or None if there are no replicas."""
    return max(replicas, key=lambda replica: (_score(session_id, replica), replica), default=None)


def _score(session_id: str, replica: str) -> bytes:
    return blake2b(f"{replica}\0{session_id}".encode(), digest_size=8).digest()


SILENT_S = 10.0
"""Seconds without a report after which a replica is dropped and its requests are lost."""
SESSIONS_MAX = 65_536
"""Maximum placed sessions that are remembered; the least recently used fall back to hashing."""


class Replica:
    """One replica, with the requests and sessions that this process has at it."""

    def __init__(self, report: ReplicaReported, now: float) -> None:
        self.report = report
        self.seen_at = now
        self.uses: dict[asyncio.Future[None], None] = {}
        """Requests of this process, as futures that are done when the request is lost."""
        self.num_sessions = 0
        """Number of open sessions placed here; those between two turns will load it again soon."""

    @property
    def load(self) -> float:
        """Requests as a fraction of those that can run at once."""
        # The report may be older than the latest requests of this process.
        return max(self.report.num_requests, len(self.uses)) / self.report.num_running_max

    @property
    def pressure(self) -> float:
        """Load, plus the load expected from sessions that this process has placed."""
        return self.load + self.num_sessions / self.report.num_running_max

    def lose(self) -> None:
        """Mark all requests as lost, so that nobody waits for their replies."""
        for use in self.uses:
            if not use.done():
                use.set_result(None)


class ReplicaTable:
    """Replicas that have reported recently; all times are monotonic, in seconds."""

    def __init__(self) -> None:
        self._replicas: dict[str, Replica] = {}
        self._homes: OrderedDict[str, str] = OrderedDict()
        """Home of each placed session, least recently used first."""
        self._changed = asyncio.Event()

    def add(self, report: ReplicaReported, now: float) -> None:
        """Process a report; if the replica restarted or is leaving, its requests are lost."""
        known = self._replicas.get(report.replica)
        if known is not None:
            # A late report of an earlier process with the same name.
            if report.started_at < known.report.started_at:
                return
            if report.started_at > known.report.started_at or report.is_leaving:
                log.info(
                    "replica %s restarted or left, %d requests lost",
                    report.replica,
                    len(known.uses),
                )
                known.lose()
        if report.is_leaving:
            self._remove(report.replica)
        elif known is None:
            log.info("replica %s joined, serving version %d", report.replica, report.policy_version)
            self._replicas[report.replica] = Replica(report, now)
        else:
            known.report, known.seen_at = report, now
        self._changed.set()

    def expire(self, now: float) -> None:
        """Drop the replicas that have been silent for too long."""
        # Over a copy, since `_remove` changes the table.
        for name, replica in list(self._replicas.items()):
            if now - replica.seen_at > SILENT_S:
                log.warning(
                    "replica %s silent for %.0f s, %d requests lost",
                    name,
                    now - replica.seen_at,
                    len(replica.uses),
                )
                replica.lose()
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Forget a replica; its sessions are placed again or fall back to hashing."""
        if self._replicas.pop(name, None) is not None:
            kept = ((session, home) for session, home in self._homes.items() if home != name)
            self._homes = OrderedDict(kept)

    def ready(self, purpose: Purpose, channel: str | None = None) -> list[ReplicaReported]:
        """Return the reports of replicas that serve a purpose, and `channel` if given.

        Raises:
            ConfigError: There is no such channel.

        """
        version = None if channel is None else pinned_version(channel)
        reports = [
            replica.report
            for replica in self._replicas.values()
            if purpose in replica.report.serves
        ]
        if version is not None:
            return [report for report in reports if report.policy_version == version]
        return [report for report in reports if channel in {None, report.channel}]

    def place(self, session_id: str, purpose: Purpose, channel: str) -> None:
        """Make the least loaded replica the home of a new session.

        A session that already has a home keeps it, unless the replica is gone.

        Args:
            session_id: Session that only this client continues; others would find it by hashing.
            purpose: Purpose of the session's requests.
            channel: Channel whose versions may answer them.

        """
        names = [report.replica for report in self.ready(purpose, channel)]
        if self._homes.get(session_id) in names:
            self._homes.move_to_end(session_id)
            return
        self.leave(session_id)
        if not names:
            return
        # Pressure, not load: many sessions may begin between two reports of a replica.
        least = min(self._replicas[name].pressure for name in names)
        fewest = [name for name in names if self._replicas[name].pressure == least]
        # By hash among equals, so that sessions spread evenly.
        home = preferred(session_id, fewest)
        assert home is not None
        self._homes[session_id] = home
        self._replicas[home].num_sessions += 1
        if len(self._homes) > SESSIONS_MAX:
            self.leave(next(iter(self._homes)))

    def leave(self, session_id: str) -> None:
        """Forget a session that is over; unknown sessions are ignored."""
        home = self._replicas.get(self._homes.pop(session_id, ""))
        if home is not None:
            home.num_sessions -= 1

    def choose(
        self, session_id: str, purpose: Purpose, channel: str, asked: Collection[str] = ()
    ) -> str | None:
        """Return the replica for a request: the session's home if it has room, or the least loaded.

        Args:
            session_id: Session of the request, whose prefix is cached at its home.
            purpose: Purpose of the request.
            channel: Channel whose versions may answer it.
            asked: Replicas that failed earlier attempts; they are only used if there is no other.

        """
        names = [report.replica for report in self.ready(purpose, channel)]
        left = [name for name in names if name not in asked] or names
        home = self._homes.get(session_id)
        own = home if home in names else preferred(session_id, names)
        with_room = [name for name in left if self._replicas[name].load < 1.0]
        # If all replicas are full, wait at home, where the prefix is cached.
        if own is None or (own in left and (own in with_room or not with_room)):
            return own
        least = min(self._replicas[name].load for name in left)
        return preferred(session_id, [n for n in left if self._replicas[n].load == least])

    async def chosen(
        self, session_id: str, purpose: Purpose, channel: str, asked: Collection[str] = ()
    ) -> str:
        """Wait until `choose` finds a replica and return it; the caller must bound the wait."""
        while (name := self.choose(session_id, purpose, channel, asked)) is None:
            # Nothing awaits between `choose` and this line, so no report can be missed.
            self._changed.clear()
            await self._changed.wait()
        return name

    @contextmanager
    def using(self, name: str) -> Generator[asyncio.Future[None]]:
        """Count a request at a replica; yield a future that is done when the request is lost."""
        replica = self._replicas[name]
        lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        replica.uses[lost] = None
        try:
            yield lost
        finally:
            del replica.uses[lost]
