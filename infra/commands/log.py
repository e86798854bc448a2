"""`penstock log export|import|cat|collect`.

`cat` decodes events without their types, so that it can read the log of any version.
"""

import argparse
import copy
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any, cast

import msgpack  # pyright: ignore[reportMissingTypeStubs]
import msgspec
import tomli_w

from penstock.actors.runtime.files import write_atomic
from penstock.actors.runtime.vault import ContentKey, Vault
from penstock.infra.bus.collector import GRACE_S, collect
from penstock.infra.bus.jetstream.log_reader import RawMessage
from penstock.infra.commands.log_file import export_log, import_log, log_types, read_header
from penstock.infra.config.file import parse_config
from penstock.infra.output import print_line, printable, write_to
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.liveness import is_up
from penstock.infra.run.runs import RunDir, open_log, open_vault
from penstock.messages.base import Event
from penstock.messages.codec import EVENTS
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError, CorruptDataError, NotFoundError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.reading.references import is_reference
from penstock.messages.task import Purpose

_BYTES_MAX = 64 << 20
"""Maximum size of a message that is decoded."""
_ITEMS_MAX = 1 << 20
"""Maximum items of all lists and maps of a message."""
_DEPTH_MAX = 64
_REJECTED = "MessageRejected"
_unpack = cast("Callable[..., Any]", msgpack.unpackb)  # pyright: ignore[reportUnknownMemberType]


def plain_map(data: bytes) -> dict[str, Any] | None:
    """Decode a msgpack map of unknown type within limits; return None for anything else."""
    if len(data) > _BYTES_MAX:
        return None
    num_items = 0

    def count(items: list[Any]) -> list[Any]:
        # msgpack amplifies: an empty map is one byte in the message and an object in memory.
        nonlocal num_items
        num_items += 1 + len(items)
        if num_items > _ITEMS_MAX:
            raise ValueError("too many items")
        return items

    def fields(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        if any(isinstance(key, dict | list) for key, _ in pairs):
            raise ValueError("a key is not a scalar")
        return {str(key): each for key, each in count(pairs)}

    try:
        value = _unpack(
            data,
            strict_map_key=False,
            unicode_errors="replace",
            max_array_len=_ITEMS_MAX,
            max_map_len=_ITEMS_MAX,
            list_hook=count,
            object_pairs_hook=fields,
        )
    except (ValueError, msgpack.UnpackException):
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


async def cat_log(
    messages: AsyncGenerator[RawMessage, None], types: Collection[str]
) -> AsyncIterator[str]:
    """Yield one JSON line per event of the types, or of all types.

    Arrays are shown by dtype and shape, and rejected messages by their content, if it is a map.
    """
    async for message in messages:
        kind = message.subject.split(".")[3]
        if types and kind not in types:
            continue
        fields = plain_map(message.data)
        if fields is None:
            fields = {"type": kind, "undecodable": message.data}
        elif kind == _REJECTED and isinstance(rejected := fields.get("data"), bytes):
            fields["data"] = plain_map(rejected) or rejected
        place = {"stream": message.stream, "sequence": message.sequence}
        # Twice: first for the order of keys, last so that no field of the event replaces it.
        line = place | _readable(fields) | place
        yield msgspec.json.encode(line).decode()


def _readable(value: Any, depth: int = 0) -> Any:
    if depth > _DEPTH_MAX:
        return "<nested too deep>"
    if isinstance(value, dict):
        fields = cast("dict[str, Any]", value)
        return {key: _readable(each, depth + 1) for key, each in fields.items()}
    if isinstance(value, list):
        items = cast("list[Any]", value)
        if len(items) == 3 and isinstance(items[0], str) and isinstance(items[2], bytes):
            return f"{items[0]}{_readable(items[1], depth + 1)}"
        return [_readable(item, depth + 1) for item in items]
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    return value if value is None or isinstance(value, str | int | float) else str(value)


async def run(arguments: argparse.Namespace) -> int:
    """Run one action."""
    actions = {"export": _export, "import": _import, "cat": _cat, "collect": _collect}
    await actions[arguments.action](arguments)
    return 0


async def _export(arguments: argparse.Namespace) -> None:
    found = await reached_run(arguments)
    async with open_log(found, "export") as bus:
        keys = await _content_keys(open_vault(found)) if arguments.with_keys else []
        count = await export_log(bus, found.store(), arguments.output, keys)
    size = arguments.output.stat().st_size / 1e6
    print_line(f"{count} events of run {found.run_id} -> {arguments.output} ({size:.1f} MB)")
    if keys:
        write_to(
            sys.stderr,
            f"warning: {arguments.output} holds the content keys of {len(keys)} users: whoever has "
            "the file can read their content, and no erasure reaches it\n",
        )


async def _content_keys(vault: Vault) -> list[ContentKey]:
    found = [await vault.take_out(owner) for owner in await vault.owners()]
    return [key for key in found if key is not None]


async def _collect(arguments: argparse.Namespace) -> None:
    found = await reached_run(arguments)
    grace_s = GRACE_S if arguments.grace_s is None else arguments.grace_s
    async with open_log(found, "collect") as bus:
        # A run that is up stores objects before the events that name them.
        if grace_s < GRACE_S and await is_up(found, bus):
            text = f"run {found.run_id} is up: expected at least {GRACE_S:g}, got {grace_s:g}"
            raise ConfigError(f"--grace-s: {text}")
        done = await collect(bus, found.store(), now=time.time(), grace_s=grace_s)
    print_line(f"{done.num_deleted} objects that no event names deleted, {done.num_kept} kept")


async def _import(arguments: argparse.Namespace) -> None:
    run_id = read_header(arguments.file)
    target = RunDir(arguments.runs_dir / run_id)
    if target.path.exists():
        raise FileExistsError(f"{target.path}: exists; move it away to import run {run_id}")
    # Into a temporary folder, so that a failed import leaves no half of a run.
    arguments.runs_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=arguments.runs_dir, prefix=".import-") as folder:
        made = RunDir(Path(folder) / run_id)
        count = await _fill(made, arguments.file)
        made.path.replace(target.path)
    print_line(f"{count} events -> {target.path}; try: penstock replay {run_id}")


async def _fill(run: RunDir, file: Path) -> int:
    async with open_log(run, "import") as bus:
        count = await import_log(bus, run.store(), file, open_vault(run))
        started = await bus.last(RunStarted)
    # The configuration comes from this event; without it the folder would not be a run.
    if started is None or not isinstance(started.event, RunStarted):
        raise CorruptDataError(f"{file}: holds no RunStarted event")
    write_atomic(run.config, imported_config(started.event.config_toml, str(file)).encode())
    return count


def imported_config(config_toml: str, source: str) -> str:
    """Return a configuration with only those settings of an untrusted file that replay needs.

    Servers, stores, folders and processes are left out: a later command would connect to them,
    execute them or delete in them.

    Args:
        config_toml: Configuration recorded in the log.
        source: Prefix of error texts.

    Raises:
        CodecError: The text is not TOML.
        ConfigError: Settings of the policy or the trainer are wrong.

    """
    given = parse_toml(config_toml, f"{source}: RunStarted.config_toml")
    tables = {name: given[name] for name in ("policy", "trainer") if name in given}
    region = {"name": "imported", "serves": [str(purpose) for purpose in Purpose]}
    # The least that `RunConfig` requires.
    kept = {"processes": {"trainer": ["trainer"]}, "regions": [region], **tables}
    config = parse_config(copy.deepcopy(kept), source)
    if is_reference(config.trainer.loss.name):
        text = f"expected no own code from a stranger's file, got {config.trainer.loss.name!r}"
        raise ConfigError(f"{source}: trainer.loss.name: {text}")
    return tomli_w.dumps(kept)


async def _cat(arguments: argparse.Namespace) -> None:
    types = _types(arguments.type)
    streams = sorted({kind.stream for kind in types or log_types()})
    found = await reached_run(arguments, any_format=True)
    async with open_log(found, "cat", any_format=True) as bus:
        messages = bus.read_raw(streams)
        async for line in cat_log(messages, {kind.__name__ for kind in types}):
            write_to(sys.stdout, printable(line) + "\n")


def _types(names: list[str]) -> list[type[Event]]:
    known = {event.__name__: event for event in EVENTS}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise NotFoundError(f"--type {unknown[0]}: expected one of {', '.join(sorted(known))}")
    return [known[name] for name in names]
