"""Streams and subjects: what each stream keeps, for how long, and how it refuses duplicates.

Events have the subject `ps.<run>.<stream>.<Type>.<key>`, requests `ps.<run>.rpc.<service>`.
"""

import re
from collections.abc import Iterable
from enum import StrEnum

import msgspec

from penstock.messages.base import Event, Message, Stream
from penstock.messages.errors import CodecError, ConfigError


class Retention(StrEnum):
    """When a stored event may be removed."""

    LIMITS = "limits"
    WORK_QUEUE = "work_queue"
    LAST_PER_SUBJECT = "last_per_subject"


class Dedup(StrEnum):
    """How a second event with the same key is refused."""

    SUBJECT = "subject"
    """By compare-and-swap: the subject must be empty. Holds forever."""
    MESSAGE_ID = "message_id"
    """By Nats-Msg-Id within the window, for streams whose events are removed when done."""
    NONE = "none"


class StreamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Provisioning settings of a stream."""

    retention: Retention
    dedup: Dedup
    in_memory: bool = False
    max_age_s: float = 0.0
    """Maximum age of an event in seconds; 0 to keep forever."""
    max_bytes: int = 8 << 30
    max_event_bytes: int = 512 << 10
    """Size in bytes above which a payload is sent by claim check."""
    window_s: float = 600.0
    """Seconds within which a repeated message id is refused."""


_LOG = StreamSpec(retention=Retention.LIMITS, dedup=Dedup.SUBJECT)

STREAMS: dict[Stream, StreamSpec] = {
    Stream.TASKS: StreamSpec(retention=Retention.WORK_QUEUE, dedup=Dedup.MESSAGE_ID),
    Stream.TRAJECTORIES: _LOG,
    Stream.REWARDS: _LOG,
    Stream.WEIGHTS: _LOG,
    Stream.CREDITS: StreamSpec(retention=Retention.LAST_PER_SUBJECT, dedup=Dedup.NONE),
    Stream.FEEDBACK: _LOG,
    # Bounded separately, so that a flood of feedback cannot crowd out recorded requests.
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
    Stream.TINKER: _LOG,
    Stream.DLQ: StreamSpec(retention=Retention.LIMITS, dedup=Dedup.SUBJECT, max_age_s=30 * 86400.0),
}

NUM_DELIVERIES_MAX = 20
"""Deliveries after which shared work that was never settled goes to the dead-letter stream.

Each worker killed during an episode counts as one, so the bound is far above the number of kills
that chaos tests inflict on one event.
"""


def check_followed(types: Iterable[type[Event]]) -> None:
    """Refuse to follow work queues, which have no log.

    Raises:
        ConfigError: One of `types` is kept on a work queue, which removes handled events.

    """
    for kind in types:
        if STREAMS[kind.stream].retention is Retention.WORK_QUEUE:
            raise ConfigError(f"follow {kind.__name__}: {kind.stream} is a work queue: consume it")


RUN_ID_CHARACTERS_MAX = 100
"""Maximum length of a run id, which is also the name of a folder."""
_TOKEN = re.compile(r"[A-Za-z0-9_\-=+:]+(\.[A-Za-z0-9_\-=+:]+)*")


def check_token(value: str, field: str) -> str:
    """Return `value` if it is valid as part of a subject.

    Raises:
        ConfigError: It is empty or has white space, wildcards or empty tokens.

    """
    if not _TOKEN.fullmatch(value):
        raise ConfigError(
            f"{field}: expected letters, digits, '_-=+:' and inner dots, got {value!r}"
        )
    return value


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it is one short token, as the subjects `ps.*.<stream>.>` require.

    Raises:
        ConfigError: It is too long or has a dot.

    """
    if len(run_id) > RUN_ID_CHARACTERS_MAX:
        raise ConfigError(f"run_id: expected at most {RUN_ID_CHARACTERS_MAX} characters")
    # A dot would add a token to every subject of the run, and filters would miss it.
    if "." in check_token(run_id, "run_id"):
        raise ConfigError(f"run_id: expected no dot, got {run_id!r}")
    return run_id


def event_subject(run_id: str, event: Event) -> str:
    """Return the subject of an event, which identifies it in the run."""
    name = type(event).__name__
    return f"ps.{run_id}.{event.stream}.{name}.{check_token(event.key(), f'{name}.key')}"


def checked_event(run_id: str, subject: str, message: Message) -> Event:
    """Return a message stored under a subject if it is the event that belongs there.

    Raises:
        CodecError: It is not an event, or its subject differs.

    """
    if not isinstance(message, Event):
        raise CodecError(f"expected an event, got {type(message).__name__}")
    try:
        actual = event_subject(run_id, message)
    except ConfigError as error:
        raise CodecError(str(error)) from error
    # Otherwise a client that may publish to one subject could pose as the author of any event.
    if actual != subject:
        raise CodecError(f"expected an event of the subject {subject}, got one of {actual[:200]}")
    return message


def type_filter(run_id: str, event_type: type[Event]) -> str:
    """Return the subject filter that matches all events of a type."""
    return f"ps.{run_id}.{event_type.stream}.{event_type.__name__}.>"


def durable_name(run_id: str, durable: str) -> str:
    """Return the name of the server's consumer that shares a run's work queue."""
    return f"{run_id}-{durable}".replace(".", "-")


def service_subject(run_id: str, service: str) -> str:
    """Return the subject of a service, e.g. `generate.train` or `sandbox.host-0`."""
    return f"ps.{run_id}.rpc.{check_token(service, 'service')}"
