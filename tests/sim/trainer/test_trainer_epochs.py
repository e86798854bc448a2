"""A finished run goes on as a service: versions of users' samples alone, in the same log."""

import msgspec
import pytest
from tests.sealed import open_vault

from penstock.actors.trainer.config import EpochConfig, OptimizerConfig, TrainerConfig
from penstock.actors.trainer.replay import ReplayLog, replay
from penstock.messages.errors import ConfigError
from penstock.messages.feedback import FeedbackRetracted, LiveSampleJoined
from penstock.messages.training import BatchManifest, StepCompleted

from .conftest import FakeContext

SERVED = OptimizerConfig(learning_rate=3e-4, beta2=0.9, warmup_steps=2)


class Service:
    """A trainer over the log of a run that has ended, and its clock."""

    def __init__(self, world, **changes) -> None:
        epoch = EpochConfig(num_samples=2, s_max=60.0)
        changes = {"steps_max": 1_000, "epoch": epoch, "optimizer": SERVED} | changes
        world.config = msgspec.structs.replace(world.config, **changes)
        self.world = world
        self.clock = 0.0

    async def start(self) -> None:
        self.ctx = FakeContext(self.world.log, self.world.store)
        self.ctx.now = lambda: self.clock
        self.trainer = self.world.trainer()
        await self.world.log.publish(*await self.trainer.start(self.ctx))
        self._position = {}
        await self.read()

    async def read(self) -> None:
        """Hand over what is on the log; a stream may be ahead of the others."""
        while (delivery := self.world._next(self._position)) is not None:
            if type(delivery.event) in self.trainer.follows:
                name = "".join(f"_{c.lower()}" if c.isupper() else c for c in _name(delivery))
                self.ctx.stored_at = self.clock
                handler = getattr(self.trainer, f"on{name}")
                await self.world.log.publish(*await handler(delivery.event, self.ctx))

    async def user(self, index: int) -> None:
        """Have a request and its feedback stored, which nobody changes later."""
        for event in self.world._live(2 * index + 1, self.version):
            if not (getattr(event, "revision", 0) or isinstance(event, FeedbackRetracted)):
                await self.world.log.publish(event)
        await self.read()

    async def tick(self, clock: float) -> None:
        self.clock = clock
        await self.world.log.publish(*await self.trainer.on_tick(self.ctx))
        await self.read()

    @property
    def version(self) -> int:
        return len(self.world.log.of(StepCompleted))


def _name(delivery) -> str:
    return type(delivery.event).__name__


@pytest.fixture
async def service(make_world):
    world = make_world(3, steps_max=3)
    live = world._live
    world._live = lambda index, version: live(index, version)[:1]  # Nobody says anything.
    await world.run()
    world._live = live
    found = Service(world)
    await found.start()
    yield found
    await found.ctx.close()


async def test_versions_are_cut_by_samples(service):
    assert service.version == 3
    await service.user(1_000)
    assert service.version == 3, "one sample is no epoch"
    await service.user(1_001)
    assert service.version == 4
    manifest = service.world.log.of(BatchManifest)[-1]
    assert manifest.groups == [] and len(manifest.live) == 2


async def test_versions_are_cut_by_time(service):
    await service.tick(50.0)
    await service.user(1_000)
    await service.tick(109.0)
    assert service.version == 3
    await service.tick(110.0)
    assert service.version == 4, "its sample has waited for 60 s"
    await service.tick(1e9)
    assert service.version == 4, "nobody waits"


async def test_a_settled_sample_that_is_read_after_its_manifest_begins_no_epoch(service):
    """As after a restart, which may read manifests first."""
    await service.user(1_000)
    await service.user(1_001)
    settled = service.world.log.of(LiveSampleJoined)[-1]
    service.ctx.stored_at = 0.0
    await service.trainer.on_live_sample_joined(settled, service.ctx)
    service.clock = 100.0
    await service.user(1_002)
    await service.tick(101.0)
    assert service.version == 4, "it has waited for a second"
    await service.tick(160.0)
    assert service.version == 5


async def test_a_restart_and_a_replay_give_the_same_bits_over_both_parts(service, make_world):
    world = service.world
    await service.user(1_000)
    await service.user(1_001)
    await service.ctx.close()  # As kill -9: the newest checkpoint is the run's last.
    await service.start()
    await service.user(1_002)
    await service.user(1_003)
    assert service.version == 5
    of_run = make_world(3, steps_max=3).config
    log = ReplayLog(
        deliveries=world.log.follow(), last=world.log.last, store=world.store, opener=open_vault()
    )
    report = await replay(log, world.policy, of_run)
    assert report.first_difference == ""
    assert report.identical and report.steps_compared == 5


def test_an_epoch_is_no_larger_than_a_batch():
    with pytest.raises(ConfigError, match=r"trainer\.epoch\.num_samples: .* 32, got 33"):
        TrainerConfig(epoch=EpochConfig(num_samples=33, s_max=1.0))


async def test_a_version_cut_by_time_moves_the_policy_as_little_as_it_has_samples(make_world):
    """Else one late sample at night would take as long a step as a full epoch."""
    losses = []
    for num_samples in (1, 4):
        service = Service(make_world(), epoch=EpochConfig(num_samples=num_samples, s_max=60.0))
        await service.start()
        await service.user(0)
        await service.tick(61.0)
        (step,) = service.world.log.of(StepCompleted)
        losses.append(step.metrics["loss"])
    assert losses[0] == pytest.approx(4 * losses[1]) and losses[1] != 0.0
