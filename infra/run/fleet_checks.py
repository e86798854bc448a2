"""What a configuration may say of sandbox hosts and their scheduler."""

import re
from collections.abc import Mapping, Sequence

from penstock.actors.sandbox_host.config import SandboxHostConfig
from penstock.messages.errors import ConfigError
from penstock.messages.task import Purpose

HOST_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
"""It becomes a subject's token and a folder's name."""
SHARED_SERVICE = "acquire"
"""`sandbox.acquire` is all hosts'."""


def check_host_name(name: str, field: str) -> None:
    """See that a host can have a name.

    Raises:
        ConfigError: It cannot; the text begins with `field`.

    """
    if HOST_NAME.fullmatch(name) is None or name == SHARED_SERVICE:
        expected = f"a host's name, {HOST_NAME.pattern} and not {SHARED_SERVICE!r}"
        raise ConfigError(f"{field}: expected {expected}, got {name!r}")


def check_fleet(
    processes: Mapping[str, Sequence[str]], sandbox: SandboxHostConfig, *, places_groups: bool
) -> None:
    """See that hosts can be told apart, and that whoever asks a scheduler has one.

    Raises:
        ConfigError: Not so; the text names the field.

    """
    check_host_name(sandbox.host, "sandbox.host")
    seen: dict[str, str] = {}
    for process, specs in processes.items():
        for spec in specs:
            if spec.partition(":")[0] not in {"sandbox", "scheduler"}:
                continue
            actor = _actor(spec, sandbox.host, f"processes.{process}")
            if actor in seen:
                text = f"{spec!r} is in processes.{seen[actor]} already, as {actor}"
                raise ConfigError(f"processes.{process}: {text}")
            seen[actor] = process
    if places_groups and not ("scheduler" in seen and sandbox.reports_to_scheduler):
        needed = 'the role "scheduler" in a process, and sandbox.reports_to_scheduler = true'
        raise ConfigError(f"rollout_worker.places_groups: expected with it {needed}")


def check_group_fits(sandbox: SandboxHostConfig, *, group_size: int, live_max: int) -> None:
    """See that a training group, which is placed whole, can be placed at all.

    Raises:
        ConfigError: It is larger than a host or its quota; the text names the field.

    """
    quota = sandbox.quotas.get(Purpose.TRAIN, sandbox.quota)
    bounds = {"pool.live_max": live_max, "sandbox.quotas.train, or sandbox.quota": quota}
    for field, bound in bounds.items():
        if 0 < bound < group_size:
            text = f"expected at least pacer.group_size {group_size}, got {bound}"
            raise ConfigError(f"{field}: {text}: rollout_worker.places_groups places groups whole")


def _actor(spec: str, host: str, field: str) -> str:
    """Return the name of the actor that `sandbox`, `sandbox:NAME` or `scheduler` stands for."""
    role, colon, name = spec.partition(":")
    if role == "scheduler":
        if colon:
            raise ConfigError(f"{field}: expected 'scheduler', got {spec!r}")
        return role
    if colon:
        check_host_name(name, f"{field}: {spec!r}")
    return f"sandbox.{name or host}"
