"""What each stream keeps, for how long, and how it refuses a second copy."""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from penstock.messages.base import Event, Stream
from penstock.messages.errors import ConfigError


class Retention(StrEnum):
    """When a stored event may go."""

    LIMITS = "limits"
    WORK_QUEUE = "work_queue"
    LAST_PER_SUBJECT = "last_per_subject"


class Dedup(StrEnum):
    """How a second publish of one key is refused."""

    SUBJECT = "subject"
    """Compare-and-swap: the subject must be empty. Holds for ever."""
    MESSAGE_ID = "message_id"
    """Nats-Msg-Id within the window; for streams whose events are removed when done."""
    NONE = "none"


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Provisioning of one stream."""

    retention: Retention
    dedup: Dedup
    in_memory: bool = False
    max_age_s: float = 0.0
    """0 keeps for ever."""
    max_bytes: int = 8 << 30
    max_event_bytes: int = 512 << 10
    """Larger payloads go by claim check."""
    window_s: float = 600.0


_LOG = StreamSpec(retention=Retention.LIMITS, dedup=Dedup.SUBJECT)

STREAMS: dict[Stream, StreamSpec] = {
    Stream.TASKS: StreamSpec(retention=Retention.WORK_QUEUE, dedup=Dedup.MESSAGE_ID),
    Stream.TRAJECTORIES: _LOG,
    Stream.REWARDS: _LOG,
    Stream.WEIGHTS: _LOG,
    Stream.CREDITS: StreamSpec(retention=Retention.LAST_PER_SUBJECT, dedup=Dedup.NONE),
    Stream.FEEDBACK: _LOG,
    Stream.TRAINING: _LOG,
    Stream.CONTROL: _LOG,
    Stream.METRICS: StreamSpec(
        retention=Retention.LIMITS, dedup=Dedup.NONE, in_memory=True, max_bytes=64 << 20
    ),
    Stream.DLQ: StreamSpec(retention=Retention.LIMITS, dedup=Dedup.SUBJECT, max_age_s=30 * 86400.0),
}

NUM_DELIVERIES_MAX = 20
"""Shared work that was delivered so often and never settled goes to the dead-letter stream. A
worker killed in the middle of an episode counts as one, so the bound is well above what chaos
tests do to one event."""


def check_followed(types: Iterable[type[Event]]) -> None:
    """Refuse to follow a work queue, which has no log.

    Raises:
        ConfigError: One of `types` is shared work, removed when it is done.

    """
    for kind in types:
        if STREAMS[kind.stream].retention is Retention.WORK_QUEUE:
            raise ConfigError(f"follow {kind.__name__}: {kind.stream} is a work queue: consume it")
