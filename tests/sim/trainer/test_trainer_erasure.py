"""A user is erased while the trainer learns: nothing that may still have to be taken needs them."""

import random

import msgspec
import pytest
from tests.sealed import MASTER_KEY

from penstock.actors.policy.snapshot import SnapshotPublisher
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.actor import Trainer
from penstock.actors.trainer.config import LiveConfig
from penstock.actors.trainer.counterfactual.retraining import retrain
from penstock.actors.trainer.counterfactual.what_if import WhatIf, replay_what_if
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.replay import ReplayLog, replay
from penstock.infra.privacy.erase import erase
from penstock.infra.privacy.lineage import read as read_lineage
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.feedback import (
    ErasurePrepared,
    ErasureRequested,
    InferenceRecorded,
    LiveSampleJoined,
    UserErased,
    owner_of,
)
from penstock.messages.reading.sealed import SealedTurn
from penstock.messages.reward import Outcome
from penstock.messages.training import BatchManifest, CheckpointSaved, StepCompleted

from .test_trainer_epochs import Service

TENANT = "acme"


class Users:
    """People whose turns are sealed under keys of theirs, and a service that learns from them."""

    def __init__(self, world) -> None:
        self.world = world
        self.service = Service(world)
        world.trainer = self._trainer
        self.num_requests = 0
        self.random = random.Random(5)

    @property
    def vault(self) -> Vault:
        """Another process's: nothing is in its memory."""
        return Vault(self.world.store, MASTER_KEY)

    def _trainer(self) -> Trainer:
        publisher: SnapshotPublisher = Publisher(StoreIO(self.world.store))
        engine = LocalEngine(self.world.policy, self.world.config, publisher)
        return Trainer(self.world.config, self.world.policy, engine, seed=7, opener=self.vault)

    async def ask(self, user: str, *, is_made: bool = True) -> None:
        """Have one request of a user rated and joined, or only drawn."""
        name = f"r{self.num_requests}"
        self.num_requests += 1
        turn = self.world.turn(self.service.version)
        sealed = await self.vault.seal(owner_of(TENANT, user), name, msgspec.msgpack.encode(turn))
        fields = {"tenant": TENANT, "user": user, "variant": "v", "propensity": 1.0}
        version = self.service.version
        recorded = InferenceRecorded(
            request_id=name, session_id=name, key_id="k", training_consent=True, replica="west",
            turn=SealedTurn(summary=turn.summary, sealed=sealed), policy_version=version, **fields,
        )  # fmt: skip
        joined = LiveSampleJoined(
            sample_id=name, request_ids=[name], feedback_ids=[f"{TENANT}.f-{name}"],
            turns=[turn.summary], reward=self.random.choice([0.0, 1.0]),
            policy_version=version, **fields,
        )  # fmt: skip
        if is_made:
            await self.world.log.publish(recorded, joined)
            await self.service.read()

    def replay_log(self) -> ReplayLog:
        return ReplayLog(
            deliveries=self.world.log.follow(),
            last=self.world.log.last,
            store=self.world.store,
            opener=self.vault,
        )

    async def replayed(self):
        return await replay(self.replay_log(), self.world.policy, self.of_run)


@pytest.fixture
async def users(make_world):
    world = make_world(3, steps_max=2, checkpoints_kept=9)
    await world.run()
    found = Users(world)
    found.of_run = make_world(3, steps_max=2).config
    await found.service.start()
    return found


class LogBus:
    """What `erase` needs of a bus."""

    def __init__(self, log) -> None:
        self.log = log

    async def publish(self, events):
        return await self.log.publish(*events)

    async def last(self, kind):
        found = [d for d in self.log.deliveries if isinstance(d.event, kind)]
        return found[-1] if found else None

    async def follow(self, types, **_options):
        for delivery in list(self.log.deliveries):
            if isinstance(delivery.event, tuple(types)):
                yield delivery


async def test_an_erased_user_s_samples_are_masked_and_all_else_goes_on(users):
    service, log = users.service, users.world.log
    for user in ("u-a", "u-b", "u-b", "u-a", "u-c"):
        await users.ask(user)
    assert service.version == 4
    waiting = log.of(InferenceRecorded)[-1]
    bus = LogBus(log)
    with pytest.raises(NotFoundError, match="nothing of acme/u-x is stored"):
        await erase(bus, users.vault, TENANT, "u-x", is_up=False)
    with pytest.raises(ConfigError, match="step 4 trained this user's samples"):
        await erase(bus, users.vault, TENANT, "u-a", is_up=False)
    assert await users.vault.open(waiting.turn.sealed, waiting.request_id), "nothing happened yet"
    await users.ask("u-a")  # Joined before the trainer has read the request to erase.
    await service.read()
    assert log.of(CheckpointSaved)[-1].step == 4
    assert len(log.of(ErasurePrepared)) == 1
    erasure = await erase(bus, users.vault, TENANT, "u-a", is_up=False)
    assert (erasure.num_samples, erasure.steps, erasure.num_requests) == (2, [3, 4], 3)
    assert log.of(UserErased)[-1].step_last == 4
    await service.read()
    await service.ctx.close()
    await service.start()  # As after kill -9: no step with the user has to be taken again.
    for user in ("u-b", "u-c", "u-a", "u-a"):  # Who comes back has another key.
        await users.ask(user)
    fates = {entry.rollout_id: entry.outcome for m in log.of(BatchManifest) for entry in m.live}
    assert fates["r5"] is Outcome.ERASED
    assert fates["r4"].is_trained and any(fates[name].is_trained for name in ("r8", "r9"))
    assert service.version >= 5
    report = await users.replayed()
    assert report.first_difference == ""
    assert (report.identical, report.steps_erased, report.steps_compared) == (
        True, 2, service.version - 2
    )  # fmt: skip
    await service.ctx.close()


async def test_an_erasure_that_died_before_it_said_so_is_finished_by_the_next(users):
    service, log = users.service, users.world.log
    await users.ask("u-a")
    await service.read()
    bus, owner = LogBus(log), f"{TENANT}/u-a"
    key_id = await users.vault.key_id(owner)
    await log.publish(ErasureRequested(tenant=TENANT, user="u-a", key_id=key_id))
    await users.vault.erase(owner)
    erasure = await erase(bus, users.vault, TENANT, "u-a", is_up=False)
    assert erasure.key_id == key_id == log.of(UserErased)[-1].key_id
    with pytest.raises(NotFoundError, match="or it was erased before"):
        await erase(bus, users.vault, TENANT, "u-a", is_up=False)
    await service.ctx.close()


async def test_what_is_joined_late_of_an_erased_user_is_masked_when_it_is_read(users):
    service, log = users.service, users.world.log
    await users.ask("u-a")
    (joined,) = [event for event in log.of(LiveSampleJoined) if event.user == "u-a"]
    late = msgspec.structs.replace(joined, revision=1)
    bus = LogBus(log)
    await erase(bus, users.vault, TENANT, "u-a", is_up=False)
    await service.read()
    await log.publish(late)
    for _ in range(3):
        await users.ask("u-b")
    fates = {e.rollout_id: e.outcome for m in log.of(BatchManifest) for e in m.live}
    assert fates[joined.sample_id] is Outcome.ERASED
    assert sum(fate.is_trained for name, fate in fates.items() if name.startswith("r")) >= 2
    await service.ctx.close()


SCRIPT = (("u-a", "u-b"), ("u-b", "u-a"), ("u-b", "u-c"), ("u-c", "u-b"), ("u-a", "u-a"))


async def served(make_world, *, without: str) -> Users:
    """Serve the script; one user's requests are drawn, and never made."""
    live = LiveConfig(user_share_max=1.0, tenant_share_max=1.0)  # Batches are as they are asked.
    world = make_world(3, steps_max=2, checkpoints_kept=9, live=live)
    await world.run()
    found = Users(world)
    found.of_run = make_world(3, steps_max=2).config
    await found.service.start()
    for pair in SCRIPT:
        for user in pair:
            await found.ask(user, is_made=user != without)
        await found.service.tick(found.service.clock + 61.0)
    await world.log.publish(*await found.service.trainer.stop(found.service.ctx))
    await found.service.ctx.close()
    return found


async def test_trained_again_without_a_user_is_bit_for_bit_a_run_that_never_had_them(make_world):
    users, never = [await served(make_world, without=name) for name in ("u-a", "")][::-1]
    log, bus = users.world.log, LogBus(users.world.log)
    with_them = log.of(StepCompleted)[-1].weights_digest
    others = [[e.rollout_id for e in m.live if e.user != "u-a"] for m in log.of(BatchManifest)]
    assert [own for own in others if own] == [
        own for m in never.world.log.of(BatchManifest) if (own := [e.rollout_id for e in m.live])
    ]
    await erase(bus, users.vault, TENANT, "u-a", is_up=False)
    left_out = (await read_lineage(bus)).trained_of_erased()
    assert left_out == {3: {"r0"}, 4: {"r3"}, 7: {"r8", "r9"}}
    learner, retrained = await retrain(
        users.replay_log(), users.world.policy, users.of_run, left_out
    )
    expected = never.world.log.of(StepCompleted)[-1]
    assert (retrained.step_first, retrained.step_last, retrained.num_left_out) == (3, 7, 4)
    assert retrained.weights_digest == learner.weights_digest() == expected.weights_digest
    assert learner.optimizer_digest() == expected.optimizer_digest
    assert retrained.weights_digest != with_them


async def test_a_what_if_ends_before_the_first_step_that_cannot_be_taken(users):
    """The checkpoints after it are of the run: nothing that was asked would be in them."""
    service, log = users.service, users.world.log
    for user in ("u-a", "u-b", "u-b", "u-a", "u-c"):
        await users.ask(user)
    await log.publish(*await service.trainer.stop(service.ctx))
    await service.ctx.close()
    assert service.version == 4
    await erase(LogBus(log), users.vault, TENANT, "u-a", is_up=False)
    learner, report = await replay_what_if(
        users.replay_log(), users.world.policy, users.of_run, WhatIf(change=_of_rloo, ess_min=0.0)
    )
    assert report.steps == 2 and report.ended.startswith("before step 3:")
    assert report.weights_digest == learner.weights_digest()
    recorded = {event.weights_digest for event in log.of(StepCompleted)}
    assert report.weights_digest not in recorded


def _of_rloo(config):
    return msgspec.structs.replace(config, estimator="rloo")
