"""The service that simulated users ask: gateway, join, trainer and generator over one bus.

All are the real actors; only the way of weights is short: the trainer's publisher hands a version
to the engine at once, since relays and receivers have their own simulation (`simulate weights`).
"""

import asyncio
import contextlib
import secrets
import tempfile
from collections.abc import AsyncGenerator, Iterable, Sequence
from pathlib import Path

import msgspec
from tests.lab.simulate.users.settings import UsersScenario
from tests.lab.simulate.users.tiny_policy import REPLY_TOKENS_MAX, TinyPolicy
from tests.lab.simulate.users.virtual_io import now_real
from tests.support.memory_bus.bus import MemoryBus
from tests.support.memory_bus.server import MemoryServer
from tests.support.virtual_clock import VirtualClock

from penstock.actors.feedback.actor import FeedbackJoiner
from penstock.actors.feedback.join import JoinConfig
from penstock.actors.generator.actor import Generator
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.actor import Actor
from penstock.actors.runtime.host import ActorHost
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.config import (
    EpochConfig,
    LiveConfig,
    LossConfig,
    MidtrainConfig,
    OptimizerConfig,
    TrainerConfig,
)
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.gateway.actor import Gateway
from penstock.gateway.config import GatewayConfig
from penstock.gateway.identity import Pseudonyms
from penstock.gateway.keys import KeySpec, hash_key
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import Event
from penstock.messages.codec import decode
from penstock.messages.signals.defaults import DEFAULT_SIGNALS
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest
from penstock.messages.weights import WeightsPublished

TICK_S = 600.0
"""Virtual seconds between two ticks of an actor: a week has a thousand."""
NEVER_S = 1e9
START_S_MAX = 300.0


class DirectPublisher:
    """Publishes a version as the trainer does, and has the engine serve it."""

    def __init__(self, publisher: Publisher, engine: TorchEngine) -> None:
        self._publisher, self._engine = publisher, engine
        self.snapshots: dict[int, Snapshot] = {}
        """Every version's weights: some ten thousand numbers each."""
        self.has_version = asyncio.Event()

    async def prepare(
        self,
        policy_version: int,
        snapshot: Snapshot,
        *,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> WeightsPublished:
        """See `SnapshotPublisher.prepare`."""
        with now_real():
            published = await self._publisher.prepare(
                policy_version,
                snapshot,
                optimizer_step=optimizer_step,
                config_json=config_json,
                probe=probe,
            )
            await self._engine.begin_update()
            await self._engine.apply(snapshot)
            await self._engine.commit(policy_version, probe=probe)
        self.snapshots[policy_version] = snapshot
        self.has_version.set()
        return published


class Service:
    """One service over an in-memory bus; `running` starts it."""

    def __init__(
        self,
        scenario: UsersScenario,
        policy: TinyPolicy,
        store: MemoryStore,
        *,
        live: LiveConfig | None = None,
        further: Sequence[str] = (),
    ) -> None:
        """Prepare; a store that holds a trained version 0 goes on from it.

        Args:
            scenario: What is simulated.
            policy: Its tenants have a key each.
            store: Holds what version 0 is mid-trained on, or version 0.
            live: What is trained of users' samples; default: as shipped.
            further: Tenants that have a key, too.

        """
        self.policy = policy
        self._secret = secrets.token_bytes(32)
        self.url = ""
        self._is_up = asyncio.Event()
        names = [*policy.tenants, *further]
        self.tokens = {tenant: f"psk-{tenant}-{secrets.token_hex(8)}" for tenant in names}
        self._clock, self._store = VirtualClock(), store
        self._server = MemoryServer(seed=scenario.seed, clock=self._clock)
        self._seed = scenario.seed
        self._engine = TorchEngine(policy.config, EngineOptions(num_tokens_max=128))
        self.publisher = DirectPublisher(Publisher(StoreIO(store)), self._engine)
        self._config = trainer_config(scenario, live or LiveConfig())

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Run until the block ends."""
        self._engine.start()
        stop = asyncio.Event()
        with tempfile.TemporaryDirectory(prefix="penstock-users-") as folder:
            async with asyncio.TaskGroup() as group:
                for actor in self._actors(Path(folder)):
                    group.create_task(self._host(actor).run(stop))
                try:
                    with now_real():
                        await self._until_served()
                    await asyncio.sleep(2 * TICK_S)  # The generator reports.
                    yield
                finally:
                    stop.set()
        with now_real():
            await self._engine.stop()

    def _actors(self, folder: Path) -> list[Actor]:
        trainer = Trainer(
            self._config,
            self.policy.config,
            LocalEngine(self.policy.config, self._config, self.publisher),
            self._seed,
            opener=Vault(self._store, self._secret),
        )
        gateway = Gateway(
            GatewayConfig(port=0, context_tokens_max=128, reply_tokens_max=REPLY_TOKENS_MAX),
            self.policy.chat,
            [self._key(tenant) for tenant in self.tokens],
            secret=self._secret,
            spool=folder / "spool",
            signals=DEFAULT_SIGNALS,
            on_listening=self._on_listening,
        )
        joiner = FeedbackJoiner(JoinConfig(reward_wait_s=60.0))
        generator = Generator(self._engine, [Purpose.LIVE], "here", "here")
        trainer.tick_s = joiner.tick_s = generator.tick_s = TICK_S
        gateway.tick_s = NEVER_S  # On the tick it forgets replicas that are silent for 10 s.
        return [trainer, joiner, gateway, generator]

    def events(self, kind: type[Event]) -> Sequence[Event]:
        """Return all stored events of a kind."""
        name = f".{kind.__name__}."
        found = [decode(stored.data) for stored in self._server.dump() if name in stored.subject]
        return [event for event in found if isinstance(event, kind)]

    async def become_ready(self) -> None:
        """Train version 0 and store it: services over a copy of the store begin there."""
        async with self.running():
            pass

    def pseudonyms(self, users: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Return tenants and users as samples name them."""
        names = Pseudonyms(self._secret)
        return {(tenant, names.user(self._key(tenant), name)) for tenant, name in users}

    @property
    def version(self) -> int:
        """The newest version that is served."""
        return max(self.publisher.snapshots, default=-1)

    def manifests(self) -> list[BatchManifest]:
        """Return the batches so far, in order."""
        found = [event for event in self.events(BatchManifest) if isinstance(event, BatchManifest)]
        return sorted(found, key=lambda manifest: manifest.step)

    def _host(self, actor: Actor) -> ActorHost:
        bus = MemoryBus(self._server, run_id="users", store=self._store, name=actor.role)
        return ActorHost(
            actor, bus, self._store, name=actor.role, seed=self._seed, clock=self._clock,
            report_s=NEVER_S,
        )  # fmt: skip

    def _key(self, tenant: str) -> KeySpec:
        limit = 1_000_000  # What is limited is feedback.
        return KeySpec(
            key_id=tenant,
            key_hash=hash_key(self.tokens[tenant]),
            storage_consent=True,
            training_consent=True,
            rpm_limit=limit,
            tpm_limit=100 * limit,
            max_parallel_requests=64,
        )

    def _on_listening(self, url: str) -> None:
        self.url = url
        self._is_up.set()

    async def _until_served(self) -> None:
        async with asyncio.timeout(START_S_MAX):
            await self._is_up.wait()
            await self.publisher.has_version.wait()


def trainer_config(scenario: UsersScenario, live: LiveConfig) -> TrainerConfig:
    """Return the settings of a trainer that learns from users alone."""
    num_samples = scenario.epoch_samples
    return TrainerConfig(
        epoch=EpochConfig(num_samples=num_samples, s_max=scenario.epoch_s),
        live=msgspec.structs.replace(live, num_samples_max=num_samples),
        midtrain=MidtrainConfig(
            num_tokens=scenario.midtrain_tokens,
            sequence_tokens=64,
            batch_tokens=2048,
            pass_tokens=2048,
            num_workers=1,
            learning_rate=2e-2,
            mtp_weight=0.0,
        ),
        optimizer=OptimizerConfig(
            learning_rate=scenario.learning_rate, beta2=0.99, warmup_steps=16
        ),
        loss=LossConfig(token_denominator=8.0),
        steps_max=10_000,
        checkpoint_steps=10_000,
        batch_wait_s_max=NEVER_S,
        staleness_max=64,
    )  # fmt: skip
