"""Subjects: `ps.<run>.<stream>.<Type>.<key>` of events, `ps.<run>.rpc.<service>` of requests."""

import re

from penstock.messages.base import Event
from penstock.messages.errors import ConfigError

_TOKEN = re.compile(r"[A-Za-z0-9_\-=+:]+(\.[A-Za-z0-9_\-=+:]+)*")


def check_token(value: str, field: str) -> str:
    """Return `value` if it can stand in a subject.

    Raises:
        ConfigError: Empty, or has white space, wildcards or empty tokens.

    """
    if not _TOKEN.fullmatch(value):
        raise ConfigError(
            f"{field}: expected letters, digits, '_-=+:' and inner dots, got {value!r}"
        )
    return value


def check_run_id(run_id: str) -> str:
    """Return `run_id` if it is one token: streams hold the subjects `ps.*.<stream>.>`.

    Raises:
        ConfigError: It is not.

    """
    if "." in check_token(run_id, "run_id"):
        raise ConfigError(f"run_id: expected no dot, got {run_id!r}")
    return run_id


def event_subject(run_id: str, event: Event) -> str:
    """Return the subject that keeps `event`; it names the event once and for all."""
    name = type(event).__name__
    return f"ps.{run_id}.{event.stream}.{name}.{check_token(event.key(), f'{name}.key')}"


def type_filter(run_id: str, event_type: type[Event]) -> str:
    """Return the filter that matches all events of one type."""
    return f"ps.{run_id}.{event_type.stream}.{event_type.__name__}.>"


def service_subject(run_id: str, service: str) -> str:
    """Return the subject of a request service, e.g. `generate.train` or `sandbox.host-0`."""
    return f"ps.{run_id}.rpc.{check_token(service, 'service')}"
