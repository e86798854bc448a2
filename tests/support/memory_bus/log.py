"""A stream in memory, as JetStream keeps one: sequence, subjects, refusal of second copies."""

import msgspec

from penstock.messages.base import Stream
from penstock.messages.bus import PublishReceipt
from penstock.messages.errors import BusError
from penstock.messages.streams import STREAMS, Dedup, Retention


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One stored message."""

    sequence: int
    subject: str
    data: bytes
    is_claim: bool
    stored_at: float
    publish_id: str


class MemoryLog:
    """One stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.last_sequence = 0
        self._spec = STREAMS[stream]
        self._stored: dict[int, Stored] = {}
        self._num_bytes = 0
        self._newest: dict[str, int] = {}
        self._seen: dict[str, tuple[float, int, str]] = {}
        """Message id -> when, sequence, publish id."""

    def store(self, message: Stored) -> PublishReceipt:
        """Append, unless the key is there; our own earlier copy counts as this one."""
        earlier = self._earlier(message)
        if earlier is not None:
            sequence, publish_id = earlier
            is_own = publish_id == message.publish_id
            return PublishReceipt(
                stream=self.stream, sequence=sequence if is_own else 0, is_duplicate=not is_own
            )
        self._make_room(message)
        self.last_sequence += 1
        self._stored[self.last_sequence] = msgspec.structs.replace(
            message, sequence=self.last_sequence
        )
        self._num_bytes += len(message.data)
        self._newest[message.subject] = self.last_sequence
        self._seen[message.subject] = (message.stored_at, self.last_sequence, message.publish_id)
        return PublishReceipt(stream=self.stream, sequence=self.last_sequence, is_duplicate=False)

    def swap(self, message: Stored, after: int) -> PublishReceipt:
        """Append, if the newest of the subject has the sequence `after`; 0: there is none."""
        newest = self._stored.get(self._newest.get(message.subject, 0))
        if newest is not None and newest.publish_id == message.publish_id:
            return PublishReceipt(stream=self.stream, sequence=newest.sequence, is_duplicate=False)
        if after != (0 if newest is None else newest.sequence):
            return PublishReceipt(stream=self.stream, sequence=0, is_duplicate=True)
        return self.store(message)

    def get(self, sequence: int) -> Stored | None:
        """Return what is stored there still."""
        return self._stored.get(sequence)

    def newest(self, prefix: str, *, is_whole: bool) -> Stored | None:
        """Return the newest of one subject, or of all that begin with `prefix`."""
        if is_whole:
            return self._stored.get(self._newest.get(prefix, 0))
        found = [seq for subject, seq in self._newest.items() if subject.startswith(prefix)]
        return self._stored.get(max(found, default=0))

    def remove(self, sequence: int) -> None:
        """Forget one message; absent is fine."""
        message = self._stored.pop(sequence, None)
        if message is not None:
            self._num_bytes -= len(message.data)
            if self._newest.get(message.subject) == sequence:
                del self._newest[message.subject]

    def restart(self) -> None:
        """Lose what a killed server loses: memory streams, and ids of what was removed."""
        if self._spec.in_memory:
            for sequence in list(self._stored):
                self.remove(sequence)
        self._seen = {
            subject: seen for subject, seen in self._seen.items() if seen[1] in self._stored
        }

    def messages(self) -> list[Stored]:
        """Return all that is stored, in order."""
        return list(self._stored.values())

    def _earlier(self, message: Stored) -> tuple[int, str] | None:
        if self._spec.dedup is Dedup.SUBJECT:
            stored = self._stored.get(self._newest.get(message.subject, 0))
            return None if stored is None else (stored.sequence, stored.publish_id)
        if self._spec.dedup is Dedup.MESSAGE_ID and message.subject in self._seen:
            stored_at, sequence, publish_id = self._seen[message.subject]
            if message.stored_at - stored_at < self._spec.window_s:
                return sequence, publish_id
        return None

    def _make_room(self, message: Stored) -> None:
        if self._spec.retention is Retention.LAST_PER_SUBJECT:
            self.remove(self._newest.get(message.subject, 0))
        while self._stored and self._num_bytes + len(message.data) > self._spec.max_bytes:
            if self._spec.dedup is not Dedup.NONE:
                raise BusError(f"{self.stream}: full, {self._spec.max_bytes} bytes are stored")
            self.remove(next(iter(self._stored)))
