"""Streams as JetStream keeps them."""

from typing import Any

from penstock.infra.bus.jetstream.answers import NAME_IN_USE, JetStreamError
from penstock.infra.bus.jetstream.connection import NatsConnection
from penstock.messages.base import Stream
from penstock.messages.streams import STREAMS, Dedup, Retention, StreamSpec


def stream_name(stream: Stream) -> str:
    """Return the JetStream name: one stream holds all runs of a server."""
    return f"PS_{stream.upper()}"


async def provision(connection: NatsConnection) -> None:
    """Create every stream, or bring it up to its specification; idempotent."""
    for stream, spec in STREAMS.items():
        name = stream_name(stream)
        config = stream_config(stream, spec)
        try:
            await connection.api(f"STREAM.CREATE.{name}", config)
        except JetStreamError as error:
            if error.code != NAME_IN_USE:
                raise
            await connection.api(f"STREAM.UPDATE.{name}", config)


async def restore(connection: NatsConnection) -> None:
    """Create again what a restarted server has forgotten: the streams in memory."""
    for stream, spec in STREAMS.items():
        if spec.in_memory:
            await connection.api(
                f"STREAM.CREATE.{stream_name(stream)}", stream_config(stream, spec)
            )


def stream_config(stream: Stream, spec: StreamSpec) -> dict[str, Any]:
    """Translate. A full log refuses new events: it never forgets old ones in silence."""
    is_queue = spec.retention is Retention.WORK_QUEUE
    is_lossy = spec.dedup is Dedup.NONE
    config: dict[str, Any] = {
        "name": stream_name(stream),
        "subjects": [f"ps.*.{stream}.>"],
        "retention": "workqueue" if is_queue else "limits",
        "storage": "memory" if spec.in_memory else "file",
        "discard": "old" if is_lossy else "new",
        "max_age": int(spec.max_age_s * 1e9),
        "max_bytes": spec.max_bytes,
        "max_msgs": -1,
        "num_replicas": 1,
        "allow_direct": True,
        "allow_atomic": not spec.in_memory,
        "duplicate_window": int(spec.window_s * 1e9),
    }
    if spec.retention is Retention.LAST_PER_SUBJECT:
        config["max_msgs_per_subject"] = 1
    return config
