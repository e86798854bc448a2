"""Two probes against each other: equal, different for a reviewed reason, or unexplained."""

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import msgspec

from penstock.envs.sandbox import Sandbox
from penstock.messages.errors import PenstockError

PROBE_S_MAX = 120.0
OUTPUT_BYTES_MAX = 1 << 20
ALLOWED_FILE = Path(__file__).with_name("allowed.toml")
PROBE_FILE = Path(__file__).with_name("probe.py")
Values = dict[str, Any]


class ProbeError(PenstockError, ValueError):
    """A probe did not run, or its file or the allow-list is malformed; the text says how."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """One check with two values."""

    check: str
    a: Any
    b: Any
    reason: str = ""
    """Of the allow-list; empty: unexplained."""


async def run_probe(sandbox: Sandbox, *options: str) -> Values:
    """Run the probe in a machine.

    Raises:
        ProbeError: It printed no result.
        SandboxError: The machine failed.

    """
    done = await sandbox.exec(
        ["python3", "-I", "-S", "-B", "-c", PROBE_FILE.read_text(), *options],
        timeout_s=PROBE_S_MAX,
        output_bytes_max=OUTPUT_BYTES_MAX,
    )
    if done.exit_code != 0:
        raise ProbeError(f"the probe ended with {done.exit_code}: {done.stderr[-400:].decode()}")
    return _decoded(done.stdout, "the probe's output")


def read_probe(path: Path) -> Values:
    """Read a probe's file.

    Raises:
        ProbeError: It is no probe.

    """
    return _decoded(path.read_bytes(), str(path))


def read_allowed(path: Path = ALLOWED_FILE) -> dict[str, str]:
    """Return the allow-list: pattern of check names -> reason.

    Raises:
        ProbeError: It is malformed, or an entry has no reason.

    """
    try:
        table = tomllib.loads(path.read_text())
        allowed = msgspec.convert(table.get("allowed", {}), dict[str, str])
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ProbeError(f"{path}: expected [allowed] with check = reason: {error}") from error
    unreasoned = [check for check, reason in allowed.items() if not reason.strip()]
    if unreasoned:
        raise ProbeError(f"{path}: no reason for {', '.join(unreasoned)}")
    return allowed


def compare(a: Values, b: Values, allowed: Mapping[str, str]) -> list[Difference]:
    """Return the checks whose values differ, unexplained ones first."""
    differences = [
        Difference(check=name, a=a.get(name), b=b.get(name), reason=_reason(name, allowed))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]
    return sorted(differences, key=lambda one: (bool(one.reason), one.check))


def _reason(check: str, allowed: Mapping[str, str]) -> str:
    return next((why for pattern, why in allowed.items() if fnmatchcase(check, pattern)), "")


def _decoded(data: bytes, where: str) -> Values:
    try:
        return msgspec.json.decode(data, type=Values)
    except msgspec.DecodeError as error:
        raise ProbeError(f"{where}: expected one JSON object: {error}") from error
