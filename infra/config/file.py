"""Reading a run's configuration: TOML files, overrides, and defaults taken from other tables."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard, cast

import msgspec

from penstock.actors.generator.config import GeneratorConfig
from penstock.actors.judge.config import JudgeConfig
from penstock.actors.policy.config import ADAPTER_TARGETS, PolicyConfig
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.config import NUM_RANKS_MAX, RanksConfig
from penstock.envs.backends import backend_class, backends
from penstock.envs.harness import HARNESS_VERSION
from penstock.infra.config.checks import check_config
from penstock.infra.config.former_names import (
    drop_former,
    present_key,
    with_present_names,
    with_present_prepare,
)
from penstock.infra.config.settings import RunConfig, is_gateway
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_toml

Table = dict[str, Any]
_PATH = re.compile(r" - at `\$\.([\w.-]+)`")


def load_config(path: Path, overrides: Sequence[str] = (), *, is_start: bool = False) -> RunConfig:
    """Read a TOML file and apply `key.path=value` overrides (values in TOML syntax).

    Raises:
        ConfigError: The file is unreadable, or a key is unknown or its value wrong; the text names
            both.

    """
    data = with_present_prepare(apply_overrides(read_toml(path), overrides))
    return parse_config(data, str(path), is_start=is_start)


def parse_config(data: Table, source: str, *, is_start: bool = False) -> RunConfig:
    """Check the tables of a configuration.

    Args:
        data: Its tables.
        source: What errors call it.
        is_start: Whether a run starts or resumes. A start refuses the links and publishing ranks
            of former releases, and plain text off this machine; readers of a log ignore both.

    Raises:
        ConfigError: As `load_config`.

    """
    data = with_present_names(data)
    drop_former(data, source, refuses=is_start)
    _derive(data)
    try:
        config = msgspec.convert(data, RunConfig)
        check_config(config)
        if is_start:
            endpoints = [one.endpoint for one in config.judge.judges if one.endpoint is not None]
            for section in (config.gateway, *config.regions, *endpoints):
                section.check_encrypted()
    except ValueError as error:
        raise ConfigError(f"{source}: {error}{_given(data, str(error))}") from error
    return config


def _given(data: Table, text: str) -> str:
    """Return the value that broke a field's constraint, which the error `text` leaves out."""
    value: Any = data
    path = _PATH.search(text)
    if path is None or ", got " in text:
        return ""
    for key in path[1].split("."):
        if not _is_table(value) or key not in value:
            return ""
        value = value[key]
    return "" if _is_table(value) else f", got {value!r}"


def read_toml(path: Path) -> Table:
    """Read a TOML file, merged over the one beside it that its key `base` names, if any.

    A process that it gives no roles, `NAME = []`, is left out.

    Raises:
        ConfigError: Missing, not TOML, or a base with a base.

    """
    data = _read_plain(path)
    if "base" not in data:
        return data
    base = _read_plain(path.parent / str(data.pop("base")))
    if "base" in base:
        raise ConfigError(f"{path}: base: expected a file without a base of its own")
    merged = _merge(base, data)
    if _is_table(processes := merged.get("processes")):
        merged["processes"] = {name: roles for name, roles in processes.items() if roles != []}
    return merged


def _read_plain(path: Path) -> Table:
    try:
        # Before the merge with a base, in which a section may have the other name.
        return with_present_names(parse_toml(path.read_text(), str(path)))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such configuration file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from error
    except CodecError as error:
        raise ConfigError(str(error)) from error


def _merge(base: Table, data: Table) -> Table:
    """Return base with data's keys set, table by table."""
    merged = dict(base)
    for key, value in data.items():
        below = merged.get(key)
        merged[key] = _merge(below, value) if _is_table(value) and _is_table(below) else value
    return merged


def _is_table(value: Any) -> TypeGuard[Table]:
    return isinstance(value, dict)


def apply_overrides(data: Table, overrides: Sequence[str]) -> Table:
    """Return the tables with `key.path=value` set; a number in a path counts a list's tables.

    Raises:
        ConfigError: Not of that form.

    """
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set {override}: expected KEY=VALUE")
        *tables, last = present_key(key.strip()).split(".")
        target: Any = data
        for table in tables:
            inner: Any = _inner(target, table)
            if not isinstance(inner, dict | list):
                raise ConfigError(f"--set {override}: {table} is not a table")
            target = cast("Any", inner)
        if not _is_table(target):
            raise ConfigError(f"--set {override}: {tables[-1]} is not a table")
        target[last] = _parse_value(text)
    return data


def _inner(target: Any, key: str) -> Any:
    """Return the next table of a path: made where there is none, or one of a list's."""
    if _is_table(target):
        return target.setdefault(key, {})
    is_there = key.isdecimal() and int(key) < len(target)
    return target[int(key)] if is_there else None


def _parse_value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}", "value")["value"]
    except CodecError:
        return text


_TABLES = (
    *("trainer", "pacer", "prepare", "sandbox_host", "rollout_worker", "judge"),
    *("model", "policy", "generator", "gateway", "evaluator"),
)


def _num_gateways(processes: Table) -> int:
    lists: list[Any] = [specs for specs in processes.values() if isinstance(specs, list)]
    return sum(is_gateway(str(spec)) for specs in lists for spec in specs)


def _derive_ranks(processes: Table, trainer: Table) -> None:
    """Give each training rank a process."""
    ranks = trainer.get("ranks", {})
    number = ranks.get("num_ranks", RanksConfig().num_ranks) if _is_table(ranks) else 0
    if trainer.get("engine") == "ranks" and isinstance(number, int) and number <= NUM_RANKS_MAX:
        for rank in range(number):
            processes.setdefault(f"rank-{rank}", [f"rank:{rank}"])


def _derive(data: Table) -> None:
    """Set defaults of one table from another's values."""
    if not all(isinstance(data.get(name, {}), dict) for name in ("processes", *_TABLES)):
        return  # What is not a table is refused as such.
    trainer = data.get("trainer", {})
    for name in ("groups_per_batch", "staleness_max", "steps_max"):
        value = trainer.get(name, getattr(TrainerConfig(), name))
        data.setdefault("pacer", {}).setdefault(name, value)
    model = data.get("model", {})
    if model.get("checkpoint") and not (model.get("text") or model.get("traces")):
        midtrain = data.setdefault("trainer", {}).setdefault("midtrain", {})
        if _is_table(midtrain):
            midtrain.setdefault("num_tokens", 0)
    if _is_table(adapter := trainer.get("adapter")):
        policy = data.setdefault("policy", {})
        if policy.get("num_experts", PolicyConfig().num_experts):
            adapter.setdefault("targets", list(ADAPTER_TARGETS[:4]))
        policy.setdefault("adapter", adapter)
    context = data.get("generator", {}).get("num_tokens_max", GeneratorConfig().num_tokens_max)
    data.setdefault("gateway", {}).setdefault("context_tokens_max", context)
    if _num_gateways(data.get("processes", {})) > 1:
        data["gateway"]["is_one_of_several"] = True
    harness = data["pacer"].get("harness", HARNESS_VERSION)
    data.setdefault("prepare", {}).setdefault("harness", harness)
    addresses = data.get("sandbox_host", {}).get("egress_addresses", False)
    data["prepare"].setdefault("egress_addresses", addresses)
    isolation_min = data.get("sandbox_host", {}).get("isolation_min", "")
    data["prepare"].setdefault("isolation_min", isolation_min)
    places = data.get("rollout_worker", {}).get("places_groups", False)
    data.setdefault("judge", {}).setdefault("places_machines", places)
    _derive_ranks(data.get("processes", {}), trainer)
    judge = data["judge"].get("judge", JudgeConfig().judge)
    data.setdefault("evaluator", {}).setdefault("judge", judge)
    pool = data.get("sandbox_host", {}).get("pool", {})
    backend = pool.get("backend", "")
    is_known = isinstance(backend, str) and backend in backends
    if is_known and (backend != "process" or pool.get("allow_process") is True):
        isolation = backend_class(backend).isolation_class.value
        data.setdefault("trainer", {}).setdefault("isolation_classes", [isolation])
