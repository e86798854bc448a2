"""Creates the streams in JetStream and keeps them up to date."""

from typing import Any

from penstock.infra.bus.jetstream.connection import NAME_IN_USE, JetStreamError, NatsConnection
from penstock.infra.bus.settings import BusSection
from penstock.messages.base import Stream
from penstock.messages.errors import BusError, ConfigError, DeadlineError
from penstock.messages.streams import STREAMS, Dedup, Retention, StreamSpec

START_S_MAX = 15.0
"""Longest wait for JetStream to answer; a cluster that has just started elects leaders."""
NOT_ENABLED = {10035, 10039, 10076}
"""Error codes: JetStream is not enabled for the account, or on the server."""
NO_STORAGE = {10002, 10023, 10028, 10047, 10122}
"""Error codes: limits of the account, of memory, of the disk, or of one stream."""
NO_PEERS = {10005, 10074}
"""Error codes: no server for a replica, or no cluster at all."""


def stream_name(stream: Stream) -> str:
    """Return the JetStream name: one stream holds all runs of a server."""
    return f"PS_{stream.upper()}"


async def provision(connection: NatsConnection) -> None:
    """Create every stream, or bring it up to its specification; idempotent.

    Raises:
        ConfigError: The servers cannot keep them; the text names the field of `[bus]`.

    """
    await check_jetstream(connection)
    for stream, spec in STREAMS.items():
        name = stream_name(stream)
        config = stream_config(stream, spec, connection.access.section)
        try:
            await _create(connection, name, config)
        except JetStreamError as error:
            raise _explained(connection, error, config) from error


async def _create(connection: NatsConnection, name: str, config: dict[str, Any]) -> None:
    try:
        await connection.api(f"STREAM.CREATE.{name}", config)
    except JetStreamError as error:
        if error.code != NAME_IN_USE:
            raise
        await _check_kept(connection, name, config)
        await connection.api(f"STREAM.UPDATE.{name}", config)


async def _check_kept(connection: NatsConnection, name: str, config: dict[str, Any]) -> None:
    """Check that a stream, which other runs use, too, keeps its room and its replicas.

    Raises:
        ConfigError: It would not: beyond its bound a stream refuses the events of every run.

    """
    info = await connection.api(f"STREAM.INFO.{name}", {})
    where, held, bound = connection.access.place, info["state"]["bytes"], config["max_bytes"]
    if config["discard"] == "new" and held > bound:
        text = f"stream {name} holds {held} bytes, of this run or others"
        raise ConfigError(f"bus.max_bytes: {where}: {text}: expected at least as many, got {bound}")
    num_replicas = info["config"]["num_replicas"]
    if num_replicas > config["num_replicas"]:
        text = f"stream {name} has {num_replicas}, which other runs may need"
        given = config["num_replicas"]
        raise ConfigError(f"bus.num_replicas: {where}: {text}: expected as many, got {given}")


async def check_jetstream(connection: NatsConnection) -> None:
    """Check that JetStream is enabled and answers; raise ConfigError otherwise."""
    text = f"bus.servers: expected JetStream at {connection.access.place}"
    try:
        await connection.api("INFO", {}, deadline_s=START_S_MAX)
    except DeadlineError as error:
        raise ConfigError(
            f"{text}: no answer within {START_S_MAX:g} s: start nats-server with `-js`, and enough "
            "servers of a cluster for a majority"
        ) from error
    except JetStreamError as error:
        if error.code not in NOT_ENABLED:
            raise
        raise ConfigError(f"{text} for our account: {error}") from error


def _explained(
    connection: NatsConnection, error: JetStreamError, config: dict[str, Any]
) -> BusError | ConfigError:
    """Return the error that says what the servers lack, and what to change."""
    name, num_replicas = config["name"], config["num_replicas"]
    where = connection.access.place
    if error.code in NO_STORAGE:
        reserved = sum(spec.max_bytes for spec in STREAMS.values() if not spec.in_memory)
        bound = connection.access.section.max_bytes
        if bound:
            reserved = sum(min(bound, s.max_bytes) for s in STREAMS.values() if not s.in_memory)
        return ConfigError(
            f"bus.max_bytes: {where}: no room for stream {name}: the streams reserve "
            f"{reserved / (1 << 30):.1f} GiB on disk on {num_replicas} server(s), "
            f"{config['max_bytes']} bytes this one: reserve less with bus.max_bytes, or raise "
            f"max_file_store of the servers or the limits of the account: {error}"
        )
    if error.code in NO_PEERS:
        return ConfigError(
            f"bus.num_replicas: expected at most as many as {where} has servers with JetStream and "
            f"room, got {num_replicas}: {error}"
        )
    return BusError(f"stream {name}: {error}")


async def restore(connection: NatsConnection) -> None:
    """Create the in-memory streams again, which a restarted server has lost."""
    for stream, spec in STREAMS.items():
        if spec.in_memory:
            config = stream_config(stream, spec, connection.access.section)
            await connection.api(f"STREAM.CREATE.{stream_name(stream)}", config)


def stream_config(stream: Stream, spec: StreamSpec, section: BusSection) -> dict[str, Any]:
    """Return the JetStream configuration of a stream."""
    # `discard: new`: a full log refuses new events rather than silently dropping old ones.
    is_queue = spec.retention is Retention.WORK_QUEUE
    is_lossy = spec.dedup is Dedup.NONE
    config: dict[str, Any] = {
        "name": stream_name(stream),
        "subjects": [f"ps.*.{stream}.>"],
        "retention": "workqueue" if is_queue else "limits",
        "storage": "memory" if spec.in_memory else "file",
        "discard": "old" if is_lossy else "new",
        "max_age": int(spec.max_age_s * 1e9),
        "max_bytes": min(spec.max_bytes, section.max_bytes or spec.max_bytes),
        "max_msgs": -1,
        "num_replicas": section.num_replicas,
        "allow_direct": True,
        "allow_atomic": not spec.in_memory,
        "duplicate_window": int(spec.window_s * 1e9),
    }
    if spec.retention is Retention.LAST_PER_SUBJECT:
        config["max_msgs_per_subject"] = 1
    return config
