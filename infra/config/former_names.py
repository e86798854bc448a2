"""Names that settings and roles had in former releases; configurations of stored runs use them."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.messages.errors import ConfigError

_ROLES = {"sandbox": "sandbox_host", "feedback_join": "feedback"}
# Longest first: `pool` moves below the section that `sandbox` becomes.
_SECTIONS = {
    "pool": ("sandbox_host", "pool"),
    "sandbox": ("sandbox_host",),
    "feedback_join": ("feedback",),
    "weights": ("relay",),
}


def present_role(spec: str) -> str:
    """Return a role, `role` or `role:place`, under its present name.

    Example: `present_role("sandbox:a") == "sandbox_host:a"`.
    """
    role, colon, place = spec.partition(":")
    return f"{_ROLES.get(role, role)}{colon}{place}"


def present_key(key: str) -> str:
    """Return a dotted setting under its present name.

    Example: `present_key("pool.size") == "sandbox_host.pool.size"`.
    """
    section, dot, rest = key.partition(".")
    return ".".join(_SECTIONS.get(section, (section,))) + dot + rest


def with_present_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's tables with every section and role under its present name.

    Raises:
        ConfigError: A setting is given under both names.

    """
    found: dict[str, Any] = {key: value for key, value in data.items() if key not in _SECTIONS}
    for former, present in _SECTIONS.items():
        if former in data:
            _add(found, present, data[former], former)
    if isinstance(found.get("processes"), dict):
        processes: dict[str, Any] = found["processes"]
        found["processes"] = {name: _renamed(specs) for name, specs in processes.items()}
    return found


def _add(found: dict[str, Any], present: tuple[str, ...], value: Any, former: str) -> None:
    *tables, last = present
    target = found
    for table in tables:
        # A copy: the caller's tables stay as they were read.
        target[table] = dict(target.get(table) or {})
        target = target[table]
    if last not in target:
        target[last] = value
        return
    there = target[last]
    if not isinstance(there, dict) or not isinstance(value, dict) or there.keys() & value.keys():
        name = ".".join(present)
        raise ConfigError(f"{former}: expected [{name}] alone, its present name; got both")
    target[last] = {**there, **value}


def _renamed(specs: Any) -> Any:
    if not isinstance(specs, list):
        return specs  # Refused by its type later.
    names = cast("list[Any]", specs)
    return [present_role(name) if isinstance(name, str) else name for name in names]
