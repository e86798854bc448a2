"""Roles of a run and the function that builds the actors of each, listed in `ROLES`.

A role that is local to a region is named `role:region`; several generators of one region are
named `generator:region/name`. Only the builders of trainer and generator import torch.
"""

import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.files import write_atomic
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.config.checks import check_host_name
from penstock.infra.config.former_names import present_role
from penstock.infra.config.regions import region_of_role, replica_name
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.liveness import become_trainer
from penstock.infra.run.runs import RunDir
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.s3 import S3Store
from penstock.messages.base import Event
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError
from penstock.messages.task import Purpose

if TYPE_CHECKING:
    from penstock.actors.policy.chat.format import ChatFormat
    from penstock.envs.microvm.pool.pool import Pool


@dataclass(frozen=True)
class Assembly:
    """Everything that the builders of actors need."""

    run: RunDir
    config: RunConfig
    bus: NatsBus
    store: ObjectStore

    async def chat_format(self) -> "ChatFormat":
        """Open the chat format of the run with its tokenizer."""
        from penstock.actors.policy.chat.open import open_chat
        from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer

        text = (await self.store.get(TOKENIZER_KEY)).decode()
        return open_chat(self.config.model.chat, Tokenizer.from_json(text, TOKENIZER_KEY))

    def region_store(self, region: str) -> ObjectStore:
        """Return the store of a region: its bucket, or a directory on this host."""
        section = self.config.region(region).store_section()
        if section is None:
            return DirectoryStore(self.run.regions / region)
        prefix = f"{self.run.run_id}/regions/{region}"
        return S3Store.open(section.bucket, prefix=prefix, endpoint=section.endpoint)


Build = Callable[[Assembly, str], Awaitable[list[tuple[str, Actor]]]]


async def build_actors(spec: str, assembly: Assembly) -> list[tuple[str, Actor]]:
    """Build the actors of `role`, `role:region` or `generator:region/name`, with their names.

    Raises:
        ConfigError: Unknown role, or a region is missing or not expected.

    """
    role, _, place = present_role(spec).partition(":")
    if role not in ROLES:
        raise ConfigError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    if (role in REGIONAL) != bool(place) and role not in NAMED:
        expected = f"{role}:REGION" if role in REGIONAL else role
        raise ConfigError(f"role {spec!r}: expected {expected}")
    if role in REGIONAL:
        assembly.config.region(region_of_role(spec) if role == "generator" else place)
    return await ROLES[role](assembly, place)


async def _trainer(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.trainer.actor import Trainer
    from penstock.infra.ranks.build import training_engine
    from penstock.infra.run.runs import open_vault

    config = assembly.config
    if config.trainer.engine == "ranks":
        # Two trainers would command the same ranks.
        await become_trainer(assembly.bus)
    engine = training_engine(config, assembly.store, assembly.bus.stream_request)
    trainer = Trainer(
        config.trainer,
        config.policy,
        engine,
        seed=config.run.seed,
        opener=open_vault(assembly.run),
    )
    return [("trainer", trainer)]


async def _training_rank(assembly: Assembly, rank: str) -> list[tuple[str, Actor]]:
    from penstock.infra.ranks.build import training_rank
    from penstock.infra.run.runs import open_vault

    actor = training_rank(assembly.config, assembly.store, rank, open_vault(assembly.run))
    return [(actor.name, actor)]


async def _generator(assembly: Assembly, place: str) -> list[tuple[str, Actor]]:
    from penstock.actors.generator.actor import Generator
    from penstock.actors.generator.lag import Lag
    from penstock.actors.policy.hf.stored import published_config
    from penstock.actors.relay.replica.receiver import HeldVersion, Receiver
    from penstock.infra.models.engine import start_engine

    config = assembly.config
    region, replica = region_of_role(f":{place}"), replica_name(f"generator:{place}")
    staleness_max = config.trainer.staleness_max
    section, settings = config.region(region), config.generator
    # Drafts repeat text that the replica has seen, so one user's latency would leak what another
    # user wrote.
    if Purpose.LIVE in section.serves:
        settings = msgspec.structs.replace(settings, num_drafts_max=0)
    engine = await start_engine(
        settings,
        config.policy,
        await assembly.chat_format(),
        await published_config(assembly.store, config.policy),
    )
    lag = Lag(staleness_max, config.generator.lag_s_max)
    generator = Generator(engine, section.serves, region, replica, channel=section.channel, lag=lag)
    receiver = Receiver(
        region,
        replica,
        assembly.region_store(region),
        engine,
        target=HeldVersion(section.channel, evaluates=Purpose.EVAL in section.serves),
        staleness_max=staleness_max,
    )
    return [(f"generator-{replica}", generator), (f"receiver-{replica}", receiver)]


async def _relay(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.relay.region.relay import Relay

    relay = Relay(
        region,
        assembly.region_store(region),
        staleness_max=assembly.config.trainer.staleness_max,
        pinned=assembly.config.versions_pinned,
    )
    return [(f"relay-{region}", relay)]


async def _compactor(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.relay.region.compactor import Compactor

    trainer = assembly.config.trainer
    since_checkpoint = trainer.checkpoint_steps * (trainer.checkpoints_kept + 1)
    num_kept = since_checkpoint + trainer.staleness_max
    return [("compactor", Compactor(num_kept, pinned=assembly.config.versions_pinned))]


async def _sandbox_host(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    """Build a sandbox host; `sandbox:NAME` is one of several."""
    from penstock.actors.sandbox_host.actor import SandboxHost
    from penstock.envs.microvm.images.assets import wait_for_build

    host = region or assembly.config.sandbox_host.host
    check_host_name(host, "role sandbox")
    config = assembly.config.sandbox_host
    await wait_for_build()
    pool = _pool(assembly.config, host)
    base = Path(config.checkpoints) / assembly.run.run_id if config.checkpoints else None
    folder = (base or assembly.run.machines) / host
    config = msgspec.structs.replace(config, checkpoints=str(folder))
    return [(f"sandbox-{host}", SandboxHost(pool, host, config))]


async def _rollout_worker(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    """Build a rollout worker once the images of machines are built."""
    if assembly.config.rollouts.is_external:
        return await _rollout_service(assembly)
    # A rollout that it takes up waits for a machine only for a limited time.
    from penstock.actors.rollout_worker.actor import RolloutWorker
    from penstock.envs.microvm.images.assets import wait_for_build

    await wait_for_build()
    chat = await assembly.chat_format()
    return [("rollout_worker", RolloutWorker(chat, assembly.config.rollout_worker))]


async def _rollout_service(assembly: Assembly) -> list[tuple[str, Actor]]:
    """Build the service that hands out rollouts in place of a rollout worker."""
    from penstock.gateway.keys import create_key
    from penstock.gateway.rollouts.service import RolloutService

    config, run = assembly.config, assembly.run
    key = create_key(run.rollouts_key, key_id="rollouts")
    service = RolloutService(
        await assembly.chat_format(),
        config.rollouts,
        config.rollout_worker,
        config.gateway,
        key_hash=key.key_hash,
        on_listening=lambda url: write_atomic(run.rollouts_url, url.encode()),
    )
    return [("rollout_worker", service)]


def _pool(config: RunConfig, host: str) -> "Pool":
    from penstock.envs.backends import open_backend
    from penstock.envs.microvm.images.layers import make_images
    from penstock.envs.microvm.pool.pool import Pool

    settings, sandbox = config.sandbox_host.pool, config.sandbox_host
    backend = open_backend(
        settings.backend, allow_process=settings.allow_process, needs=settings.needs
    )
    own = Path(sandbox.images) / host if sandbox.images else None
    images = make_images(backend, own, sandbox.images_max)
    return Pool(backend, size=settings.size, live_max=settings.live_max, images=images)


async def _scheduler(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.scheduler.actor import SandboxScheduler

    config = assembly.config.sandbox_host
    return [("scheduler", SandboxScheduler(config.quota, config.quotas))]


async def _pacer(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.pacer.actor import Pacer

    config = assembly.config
    weights = {source.name: source.weight for source in config.prepare.all_sources}
    pacer = msgspec.structs.replace(config.pacer, seed=config.run.seed)
    return [("pacer", Pacer(pacer, weights))]


async def _gateway(assembly: Assembly, place: str) -> list[tuple[str, Actor]]:
    """Build a gateway; `gateway:NAME` is one of several, which share a key and a port."""
    from penstock.gateway.actor import Gateway
    from penstock.gateway.keys import create_key
    from penstock.infra.run.runs import master_key

    run = assembly.run
    key = create_key(run.gateway_key, key_id="local", has_consent=True)

    def listening(url: str) -> None:
        for file in {run.gateway_url, run.gateway_url_of(place)}:
            write_atomic(file, url.encode())

    def page_ready(link: str) -> None:
        write_atomic(run.page_url_of(place), link.encode(), mode=0o600)

    if place:
        check_host_name(place, f"role gateway:{place}")

    chat_format = await assembly.chat_format()
    gateway = Gateway(
        assembly.config.gateway,
        chat_format,
        [key],
        secret=master_key(run),
        public_tools=assembly.config.gatekeeper.edit_tools,
        spool=run.gateway_spool,
        signals=assembly.config.feedback.signals,
        summary=assembly.config.rollout_worker.summary,
        on_listening=listening,
        on_page=page_ready,
    )
    return [(f"gateway-{place}" if place else "gateway", gateway)]


async def _judge(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.judge.actor import JudgeActor

    config, chat = assembly.config, await assembly.chat_format()
    return [("judge", JudgeActor(chat, config.judge, config.rollout_worker.summary))]


async def _gatekeeper(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.gatekeeper.actor import Gatekeeper

    config = assembly.config
    return [("gatekeeper", Gatekeeper(config.gatekeeper, config.evaluator.judge))]


async def _monitor(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.actors.monitor.actor import Monitor

    return [("monitor", Monitor())]


async def _tinker(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
    from penstock.gateway.keys import KeysFile, create_key
    from penstock.infra.tinker.book import TYPES
    from penstock.infra.tinker.opening import names_of, open_base
    from penstock.infra.tinker.routes import build_app
    from penstock.infra.tinker.server import TinkerServer

    run, config = assembly.run, assembly.config
    own = create_key(run.gateway_key, key_id="local", has_consent=True)
    server = TinkerServer(
        config.tinker,
        config.gateway,
        await open_base(assembly.store, config),
        names_of(config),
        KeysFile([own], config.gateway.keys_file),
        lambda: assembly.bus.follow(TYPES, stop_at_end=True),
        build_app,
        lambda url: write_atomic(run.tinker_url, url.encode()),
    )
    return [("tinker", server)]


def _plain(module: str, name: str, section: str) -> Build:
    """Return the builder of an actor that needs only its settings."""

    async def build(assembly: Assembly, region: str) -> list[tuple[str, Actor]]:
        make = getattr(importlib.import_module(module), name)
        return [(make.role, make(getattr(assembly.config, section)))]

    return build


ROLES: dict[str, Build] = {
    "trainer": _trainer,
    "rank": _training_rank,
    "generator": _generator,
    "relay": _relay,
    "compactor": _compactor,
    "rollout_worker": _rollout_worker,
    "sandbox_host": _sandbox_host,
    "scheduler": _scheduler,
    "judge": _judge,
    "pacer": _pacer,
    "evaluator": _plain("penstock.actors.evaluator.actor", "Evaluator", "evaluator"),
    "feedback": _plain("penstock.actors.feedback.actor", "FeedbackJoiner", "feedback"),
    "gatekeeper": _gatekeeper,
    "gateway": _gateway,
    "monitor": _monitor,
    "tinker": _tinker,
}
_WORKERS = {
    "rollout_worker": "penstock.actors.rollout_worker.actor:RolloutWorker",
    "judge": "penstock.actors.judge.actor:JudgeActor",
}
"""Roles that share a work queue, with their actor classes; the others only follow the log."""
REGIONAL = frozenset({"generator", "relay"})
NAMED = frozenset({"sandbox_host", "gateway", "rank"})
"""Roles that can have several named instances: a name, not a region, follows the colon."""


def work_queues(config: RunConfig) -> dict[str, Sequence[type[Event]]]:
    """Return the event types of each work queue of a run, by name of the consumer."""
    roles = {spec.partition(":")[0] for specs in config.processes.values() for spec in specs}
    found: dict[str, Sequence[type[Event]]] = {}
    for role in sorted(roles & set(_WORKERS)):
        module, _, name = _WORKERS[role].partition(":")
        found[role] = getattr(importlib.import_module(module), name).consumes
    return found
