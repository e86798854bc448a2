"""Settings and roles of former releases, which configurations of stored runs still use."""

import sys
from collections.abc import Mapping
from typing import Any, TypeGuard, cast

from penstock.infra.output import write_to
from penstock.messages.errors import ConfigError

_ROLES = {"sandbox": "sandbox_host", "feedback_join": "feedback"}
_SECTIONS = {
    "pool": ("sandbox_host", "pool"),
    "sandbox": ("sandbox_host",),
    "feedback_join": ("feedback",),
    "weights": ("relay",),
}

_EXAMPLE = "penstock.examples.quickstart"
_OF_TRAILS = ("num_demonstrations", "context_weight", "drill_tokens", "drill_half_tokens")
_OLD_SETTINGS = (*_OF_TRAILS, "code_tokens", "code_weight", "endings", "piece_tokens", "habits")
"""Settings of `[prepare]` up to 0.2 that the quickstart's corpora have as own settings now."""


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


def with_present_prepare(data: dict[str, Any]) -> dict[str, Any]:
    """Return the tables of a stored run with the quickstart's parts named as own code.

    Up to 0.2, `[prepare]` had the quickstart's tasks, `ladder` and `trail`, built in and as the
    default, and its sample users came to every run with `users.num_requests` above 0.
    """
    prepare = data.get("prepare", {})
    users = data.get("users", {})
    if not _is_table(prepare) or not _is_table(users):
        return data
    if users.get("num_requests") and not users.get("run"):
        data["users"] = users | {"run": f"{_EXAMPLE}:users"}
    left = dict(prepare)
    if "corpora" in left or not isinstance(left.get("sources", []), list):
        return data
    given: list[Any] = left.get("sources", [])
    settings = {name: left.pop(name) for name in _OLD_SETTINGS if name in left}
    of_ladder, trail = left.pop("selection", {}), left.pop("trail", None)
    if given:
        sources = [_translated_source(each, of_ladder, trail) for each in given]
    else:
        kind = "ladder" if trail is None else "trail"
        only = {"name": kind, "kind": kind}
        sources = [_translated_source(only, of_ladder, trail, prefix="")]
    if not left.get("tasks"):
        left["sources"] = sources
    if trail is None:
        settings |= {"selection": of_ladder}
    else:
        settings = {name: settings[name] for name in _OF_TRAILS if name in settings}
        settings |= {"trail": trail}
    make = f"{_EXAMPLE}:{'ladder' if trail is None else 'trail'}_corpora"
    left["corpora"] = {"make": make, "settings": settings}
    return data | {"prepare": left}


def _translated_source(
    source: Any, selection: dict[str, Any], trail: dict[str, Any] | None, prefix: str | None = None
) -> Any:
    """Return a source of kind `ladder` or `trail` as one of own code; others as they are."""
    if not _is_table(source) or source.get("kind") not in {"ladder", "trail"}:
        return source
    kind = source["kind"]
    kept = {name: value for name, value in source.items() if name not in {"selection", "trail"}}
    if kind == "ladder":
        settings = dict(source.get("selection", selection))
    else:
        settings = dict(source.get("trail", trail or {}))
    if prefix is not None:
        settings["prefix"] = prefix
    return kept | {"kind": "own", "make": f"{_EXAMPLE}:{kind}_tasks", "settings": settings}


def drop_former(data: dict[str, Any], source: str, *, refuses: bool) -> None:
    """Remove emulated links and publishing ranks, which change no bit of a run's log.

    Raises:
        ConfigError: One of them, if `refuses`: a start would silently run without it.

    """
    _drop_publishing_ranks(data, source, refuses=refuses)
    regions = data.get("regions")
    for region in cast("list[Any]", regions) if isinstance(regions, list) else ():
        if not _is_table(region) or "link" not in region:
            continue
        field = f"{source}: regions.{region.get('name')}.link"
        if refuses:
            text = "no longer a setting; to emulate links: python -m tests.lab regions --links FILE"
            raise ConfigError(f"{field}: {text}")
        del region["link"]
        write_to(sys.stderr, f"{field}: ignored, as emulated links are no longer a setting\n")


def _drop_publishing_ranks(data: dict[str, Any], source: str, *, refuses: bool) -> None:
    relay, processes = data.get("relay"), data.get("processes")
    if not _is_table(relay) or relay.keys() - {"num_publisher_ranks"}:
        return  # No table, or one that is refused later.
    if refuses and relay.get("num_publisher_ranks", 1) != 1:
        text = 'no longer a setting; several processes publish with trainer.engine = "ranks"'
        raise ConfigError(f"{source}: relay.num_publisher_ranks: {text}")
    del data["relay"]
    if _is_table(processes):
        # Their processes had no other role unless a file said so.
        data["processes"] = {
            name: specs for name, specs in processes.items() if "publisher:" not in str(specs)
        }


def _is_table(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
