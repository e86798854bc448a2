"""Streams and their subjects: what each stream keeps, for how long, and how it refuses a copy.

`ps.<run>.<stream>.<Type>.<key>` are events, `ps.<run>.rpc.<service>` requests.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from penstock.messages.base import Event, Message, Stream
from penstock.messages.errors import CodecError, ConfigError


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
    Stream.SIGNALS: StreamSpec(retention=Retention.LIMITS, dedup=Dedup.SUBJECT, max_bytes=2 << 30),
    Stream.GATEWAY: StreamSpec(
        retention=Retention.LAST_PER_SUBJECT,
        dedup=Dedup.NONE,
        in_memory=True,
        max_age_s=600.0,
        max_bytes=64 << 20,
    ),
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


RUN_ID_CHARACTERS_MAX = 100
"""It also names a folder."""
_TOKEN = re.compile(r"[A-Za-z0-9_\-=+:]+(\.[A-Za-z0-9_\-=+:]+)*")


def check_token(value: str, field: str) -> str:
    """Return `value` if it is valid in a subject.

    Raises:
        ConfigError: Empty, or has white space, wildcards or empty tokens.

    """
    if not _TOKEN.fullmatch(value):
        raise ConfigError(
            f"{field}: expected letters, digits, '_-=+:' and inner dots, got {value!r}"
        )
    return value


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it is one short token: streams hold the subjects `ps.*.<stream>.>`.

    Raises:
        ConfigError: It is not.

    """
    if len(run_id) > RUN_ID_CHARACTERS_MAX:
        raise ConfigError(f"run_id: expected at most {RUN_ID_CHARACTERS_MAX} characters")
    if "." in check_token(run_id, "run_id"):
        raise ConfigError(f"run_id: expected no dot, got {run_id!r}")
    return run_id


def event_subject(run_id: str, event: Event) -> str:
    """Return the subject that keeps `event`; it names the event once and for all."""
    name = type(event).__name__
    return f"ps.{run_id}.{event.stream}.{name}.{check_token(event.key(), f'{name}.key')}"


def checked_event(run_id: str, subject: str, message: Message) -> Event:
    """Return a message that was stored under a subject, if it is the event that belongs there.

    Raises:
        CodecError: It is no event, or another one.

    """
    if not isinstance(message, Event):
        raise CodecError(f"expected an event, got {type(message).__name__}")
    try:
        own = event_subject(run_id, message)
    except ConfigError as error:
        raise CodecError(str(error)) from error
    if own != subject:
        raise CodecError(f"expected an event of the subject {subject}, got one of {own[:200]}")
    return message


def type_filter(run_id: str, event_type: type[Event]) -> str:
    """Return the filter that matches all events of one type."""
    return f"ps.{run_id}.{event_type.stream}.{event_type.__name__}.>"


def service_subject(run_id: str, service: str) -> str:
    """Return the subject of a request service, e.g. `generate.train` or `sandbox.host-0`."""
    return f"ps.{run_id}.rpc.{check_token(service, 'service')}"
