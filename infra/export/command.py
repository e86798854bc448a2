"""`penstock export RUN [--version N] -o DIR`, and `--format traces -o FILE`."""

import argparse
import asyncio
import contextlib
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

from penstock.actors.policy.adapter import PREFIX
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, config_json, read_hf_config
from penstock.actors.policy.hf.foreign import foreign_config_json
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.core.version_head import HeadSlot, read_head
from penstock.actors.relay.publish.history import read_back, read_committed
from penstock.actors.runtime.files import write_atomic
from penstock.infra.config.file import load_config
from penstock.infra.export.folder import check_target, write_adapter, write_model
from penstock.infra.export.preferences import export_preferences
from penstock.infra.export.tokenizer_files import tokenizer_files
from penstock.infra.export.traces import export_atif, export_traces
from penstock.infra.output import print_result
from penstock.infra.run.hosts import reached_run
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.stores.lazy import LazyJetStreamStore
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError, NotFoundError


async def export(arguments: argparse.Namespace) -> int:
    """Write one version of a run's policy, or its solved rollouts, in the format that is asked."""
    run = await reached_run(arguments)
    if arguments.format in {"traces", "atif"}:
        return await _export_traces(run, arguments)
    if arguments.format == "preferences":
        return await _export_preferences(run, arguments)
    check_target(arguments.output)
    async with _objects(run) as store:
        return await _export(run, store, arguments)


@contextlib.asynccontextmanager
async def _objects(run: RunDir) -> AsyncGenerator[ObjectStore]:
    """Open a run's objects; those on its server as `open_log` does, which raises likewise."""
    store = run.store()
    if isinstance(store, LazyJetStreamStore):
        async with open_log(run, "export"):
            yield store
    else:
        yield store


async def _export_traces(run: RunDir, arguments: argparse.Namespace) -> int:
    if arguments.version is not None:
        raise ConfigError("--version: traces are of all versions; leave it out")
    write = export_atif if arguments.format == "atif" else export_traces
    count = await write(run, arguments.output)
    result = {"run_id": run.run_id, "traces": count, "file": str(arguments.output)}
    print_result(result, as_json=arguments.json)
    return 0


async def _export_preferences(run: RunDir, arguments: argparse.Namespace) -> int:
    if arguments.version is not None:
        raise ConfigError("--version: preferences are of all versions; leave it out")
    counts = await export_preferences(run, arguments.output)
    result = {"run_id": run.run_id, **counts, "folder": str(arguments.output)}
    print_result(result, as_json=arguments.json)
    return 0


async def _export(run: RunDir, store: ObjectStore, arguments: argparse.Namespace) -> int:
    target: Path = arguments.output
    head = await read_head(store)
    version = _chosen(run.run_id, head.policy_version, arguments.version)
    try:
        config, text = await _policy_config(store, head)
        flat, manifest = await read_back(StoreIO(store), version)
    except NotFoundError as error:
        text = f"run {run.run_id}: version {version} is no longer in its store: {error}"
        raise NotFoundError(text) from error
    adapted = load_config(run.config) if any(n.startswith(PREFIX) for n in flat.tensors) else None
    adapter = adapted and adapted.trainer.adapter
    result = {
        "run_id": run.run_id,
        "policy_version": version,
        "folder": str(target),
        "root_digest": manifest.target_root_digest,
    }
    if arguments.format == "peft":
        if adapted is None or adapter is None:
            text = "expected a run with trainer.adapter"
            raise ConfigError(f"--format peft: {text}; {run.run_id} trains all weights")
        base = adapted.model.checkpoint
        await asyncio.to_thread(write_adapter, target, flat.tensors, adapter, base)
        print_result(result, as_json=arguments.json)
        return 0
    tokenizer = await tokenizer_files(store, config.max_position_embeddings)
    if config.is_foreign:
        text = foreign_config_json(text, **tokenizer.special_ids)
    else:
        text = config_json(config, **tokenizer.special_ids)
    await asyncio.to_thread(write_model, target, text, flat.tensors, tokenizer, adapter)
    print_result(result, as_json=arguments.json)
    return 0


def _chosen(run_id: str, newest: int, version: int | None) -> int:
    """Return the version to export: what was asked for, or the newest.

    Raises:
        NotFoundError: There is no such version.

    """
    if newest < 0:
        raise NotFoundError(f"run {run_id}: it has published no weights yet")
    if version is not None and not 0 <= version <= newest:
        raise NotFoundError(f"run {run_id}: version {version}: expected one of 0 to {newest}")
    return newest if version is None else version


async def _policy_config(store: ObjectStore, head: HeadSlot) -> tuple[PolicyConfig, str]:
    """Return the shape of a run's policy, and the config.json in its first version's manifest."""
    first = await read_committed(store, 0, head)
    with tempfile.TemporaryDirectory() as name:
        write_atomic(Path(name) / CONFIG_FILE, first.config_json.encode())
        return read_hf_config(Path(name)), first.config_json
