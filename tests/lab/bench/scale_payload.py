"""How much of the turns' bytes the log carries, and how often they are stored.

A tenth of what 1,024 rollouts of 20,000 tokens make, through a real nats-server and a real store:
turns with the routes of a model of 48 layers and 8 of 128 experts. The trainer's own reader then
reads every turn back, within its bound; the log is exported, imported into another store and read
there; at last its streams are purged and the objects collected.
"""

import asyncio
import contextlib
import json
import tempfile
import time
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from nats.aio.client import Client

from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.routes import rollout_routes
from penstock.actors.trainer.turns import TurnStore
from penstock.infra.bus.collector import collect
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.provision import stream_name
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.commands.log_file import export_log, import_log
from penstock.infra.stores.directory import DirectoryStore
from penstock.kernels.arrays import to_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.base import Stream
from penstock.messages.reading.claims import CLAIM_PREFIX
from penstock.messages.reading.trajectories import last_of
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry

GROUP_SIZE, NUM_TURNS, CONTEXT_TOKENS, SAMPLED_TOKENS = 8, 20, 700, 300
NUM_ROLLOUTS = 104
"""A tenth of 1,024, in whole groups."""
NUM_LAYERS, NUM_CHOSEN, NUM_EXPERTS = 48, 8, 128
FILE_BYTES = 8 << 10
"""Left by each rollout."""
NUM_WRITERS = 4
TURNS_BYTES_MAX = 64 << 20
"""Bound of the reader, well below the whole."""
_STREAMS = (Stream.TRAJECTORIES, Stream.REWARDS, Stream.TRAINING)


@dataclass(frozen=True, kw_only=True)
class LogSite:
    """A server with one run's log and objects."""

    url: str
    folder: Path
    store: DirectoryStore
    bus: NatsBus


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the server and the store hold of a run."""

    event_bytes: int
    store_bytes: int


async def measure_payload(
    num_rollouts: int = NUM_ROLLOUTS, num_turns: int = NUM_TURNS
) -> dict[str, Any]:
    """Write, read, export, import and collect."""
    turns = list(_turns(num_turns))
    payload_bytes = num_rollouts * (
        sum(len(msgspec.msgpack.encode(turn)) for turn in turns) + FILE_BYTES
    )
    async with _site() as site:
        bus, store = site.bus, site.store
        started = time.perf_counter()
        await _write(bus, turns, num_rollouts)
        written_s = time.perf_counter() - started
        held = await _held(site)
        started = time.perf_counter()
        num_tokens = await _read(bus, store, turns)
        read_s = time.perf_counter() - started
        file = site.folder / "exported"
        await export_log(bus, store, file)
        async with _site() as other:
            await import_log(other.bus, other.store, file, Vault(other.store, bytes(32)))
            num_imported = await _read(other.bus, other.store, turns)
        await _purge(site)
        await collect(bus, store, now=time.time(), grace_s=0.0)
        num_left = len(await store.keys(CLAIM_PREFIX))
    return {
        "rollouts": num_rollouts,
        "payload_mb": round(payload_bytes / 1e6, 1),
        "event_mb": round(held.event_bytes / 1e6, 3),
        "store_mb": round(held.store_bytes / 1e6, 1),
        "tokens_read": num_tokens,
        "tokens_imported": num_imported,
        "objects_left": num_left,
        "write_mb_per_s": round(payload_bytes / 1e6 / written_s, 1),
        "read_mb_per_s": round(payload_bytes / 1e6 / read_s, 1),
        "event_share": round(held.event_bytes / payload_bytes, 5),
        "stored_copies": round((held.event_bytes + held.store_bytes) / payload_bytes, 4),
    }


def _turns(num_turns: int) -> Iterator[Turn]:
    """Yield the turns of one rollout; all rollouts have these bytes, in objects of their own."""
    dice = np.random.default_rng(0)
    length = CONTEXT_TOKENS + SAMPLED_TOKENS
    for index in range(num_turns):
        first = max(0, index * length - 1)
        shape = ((index + 1) * length - 1 - first, NUM_LAYERS, NUM_CHOSEN)
        routes: torch.Tensor = torch.tensor(dice.integers(0, NUM_EXPERTS, shape, dtype=np.int16))
        segment = seal_routes(
            routes, num_experts=NUM_EXPERTS, policy_version=0, first_position=first
        )
        yield Turn(
            context_ids=to_array(dice.integers(0, 1 << 17, CONTEXT_TOKENS, dtype=np.int32)),
            token_ids=to_array(dice.integers(0, 1 << 17, SAMPLED_TOKENS, dtype=np.int32)),
            behavior_logprobs=to_array(-dice.random(SAMPLED_TOKENS, dtype=np.float32)),
            version_spans=[VersionSpan(policy_version=0, num_tokens=SAMPLED_TOKENS)],
            stop_reason=StopReason.STOP,
            route_segments=[segment],
        )


async def _write(bus: NatsBus, turns: list[Turn], num_rollouts: int) -> None:
    """Publish what workers, judges and the trainer publish of these rollouts."""
    room = asyncio.Semaphore(NUM_WRITERS)

    async def rollout(number: int) -> None:
        name, group = f"r{number}", number // GROUP_SIZE
        async with room:
            for index, turn in enumerate(turns):
                sampled = TurnSampled(
                    rollout_id=name, group_id=f"g{group}", purpose=Purpose.TRAIN,
                    turn_index=index, turn=turn,
                )  # fmt: skip
                await bus.publish([sampled])
            finished = RolloutFinished(
                rollout_id=name, group_id=f"g{group}", group_index=group, group_size=GROUP_SIZE,
                member=number % GROUP_SIZE, purpose=Purpose.TRAIN, task_id="t", category="c",
                end=EpisodeEnd.FINISHED, turns=[turn.summary for turn in turns],
                files=EpisodeFiles(changed={"solution.py": bytes(FILE_BYTES)}),
            )  # fmt: skip
            verdict = Verdict(
                rollout_id=name, group_id=f"g{group}", group_index=group, purpose=Purpose.TRAIN,
                judge="tests", judge_version="1", outcome=Outcome.SOLVED, reward=1.0,
            )  # fmt: skip
            await bus.publish([finished, verdict])

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_rollouts):
            tasks.create_task(rollout(number))
    spans = [VersionSpan(policy_version=0, num_tokens=SAMPLED_TOKENS * len(turns))]
    for group in range(num_rollouts // GROUP_SIZE):
        samples = [
            SampleEntry(
                rollout_id=f"r{group * GROUP_SIZE + member}", outcome=Outcome.SOLVED, reward=1.0,
                advantage=0.0, version_spans=spans,
            )
            for member in range(GROUP_SIZE)
        ]  # fmt: skip
        entry = GroupEntry(group_id=f"g{group}", group_index=group, task_id="t", samples=samples)
        await bus.publish([BatchManifest(step=group + 1, policy_version=group, groups=[entry])])


async def _read(bus: NatsBus, store: DirectoryStore, turns: list[Turn]) -> int:
    """Read every batch as the trainer does; return how many sampled tokens there were.

    Raises:
        CorruptDataError: Routes are damaged.
        AssertionError: The turns are others than were written, or the bound did not hold.

    """
    kept, num_tokens = TurnStore(TURNS_BYTES_MAX, Vault(store, bytes(32))), 0
    types = (TurnSampled, RolloutFinished, BatchManifest)
    async for delivery in bus.follow(types, stop_at_end=True):
        match delivery.event:
            case TurnSampled() as event:
                kept.add_turn(event)
            case RolloutFinished() as event:
                kept.add(event.rollout_id, event)
            case BatchManifest() as event:
                loaded = await kept.load(trained_samples(event), store, last_of(bus))
                rollout_routes(next(iter(loaded.values())))
                assert all(found == turns for found in loaded.values())
                assert kept.num_bytes <= TURNS_BYTES_MAX
                num_tokens += SAMPLED_TOKENS * sum(len(found) for found in loaded.values())
                kept.drop(event)
            case _:
                pass
    return num_tokens


async def _held(site: LogSite) -> Measured:
    num_bytes = 0
    async with _client(site) as client:
        for stream in Stream:
            reply = await client.request(f"$JS.API.STREAM.INFO.{stream_name(stream)}", b"")
            num_bytes += json.loads(reply.data)["state"]["bytes"]
    objects = (path for path in (site.folder / "objects").rglob("*") if path.is_file())
    return Measured(event_bytes=num_bytes, store_bytes=sum(p.stat().st_size for p in objects))


async def _purge(site: LogSite) -> None:
    async with _client(site) as client:
        for stream in _STREAMS:
            await client.request(f"$JS.API.STREAM.PURGE.{stream_name(stream)}", b"")


@contextlib.asynccontextmanager
async def _client(site: LogSite) -> AsyncGenerator[Client]:
    client = Client()
    await client.connect(site.url)
    try:
        yield client
    finally:
        await client.close()


@contextlib.asynccontextmanager
async def _site() -> AsyncGenerator[LogSite]:
    """Yield a server of its own, with its bus and objects."""
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        store = DirectoryStore(folder / "objects")
        server = EmbeddedServer(store_dir=folder / "nats")
        await server.start()
        stack.push_async_callback(server.stop)
        bus = await NatsBus.connect(server.url, run_id="bench", store=store, name="bench")
        stack.push_async_callback(bus.close)
        await bus.provision()
        yield LogSite(url=server.url, folder=folder, store=store, bus=bus)
