"""A rollout worker's credentials on a run's server: it poses as other roles, and destroys."""

import asyncio
import json

import nats
import pytest

from penstock.infra.bus.jetstream.access import as_access, inbox_prefix
from penstock.infra.bus.jetstream.bus import NatsBus
from penstock.infra.bus.jetstream.connection import DeniedError
from penstock.infra.bus.permissions import permissions
from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.codec import encode
from penstock.messages.feedback import ErasureRequested, InferenceRecorded, UserErased
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.streams import durable_name, event_subject
from penstock.messages.task import Purpose
from penstock.messages.training import BatchManifest

RUN, WORKER = "r1", "rollout_worker"


def _verdict(rollout_id):
    return Verdict(
        rollout_id=rollout_id, group_id="g", group_index=0, purpose=Purpose.TRAIN,
        judge="hidden_tests", judge_version="6", outcome=Outcome.SOLVED, reward=1.0,
        components={"tests": 1.0},
    )  # fmt: skip


class World:
    def __init__(self, server, owner):
        self.server, self.owner = server, owner
        host = server.url.rpartition("@")[2]
        self.url = f"nats://{server.credentials(WORKER)}@{host}"

    async def worker(self):
        return await NatsBus.connect(self.url, run_id=RUN, store=MemoryStore(), name="worker")

    async def client(self, refused):
        async def note(error):
            refused.append(str(error))

        access = as_access(self.url)
        return await nats.connect(access.servers, error_cb=note, **access.options)

    async def durables(self):
        names = await self.owner._connection.api("CONSUMER.NAMES.PS_TRAJECTORIES", {})
        return names["consumers"]


@pytest.fixture
async def world(tmp_path):
    allowed = permissions([WORKER], RUN, inbox_prefix(WORKER))
    server = EmbeddedServer(store_dir=tmp_path / "events", identities={WORKER: allowed})
    await server.start()
    owner = await NatsBus.connect(server.url, run_id=RUN, store=MemoryStore(), name="owner")
    await owner.provision()
    await owner.provision_work("judge", [RolloutFinished], ack_wait_s=30.0)
    yield World(server, owner)
    await owner.close()
    await server.stop()


@pytest.mark.parametrize(
    "event",
    [
        _verdict("x"),
        BatchManifest(step=1, policy_version=0, groups=[]),
        ErasureRequested(tenant="t", user="u", key_id="0" * 16),
        UserErased(tenant="t", user="u", key_id="0" * 16),
    ],
    ids=lambda event: type(event).__name__,
)
async def test_events_of_others_are_refused_at_once(world, event):
    worker = await world.worker()
    with pytest.raises(DeniedError, match=f"{type(event).__name__}.*may not publish"):
        await worker.publish([event])
    assert await world.owner.last(type(event)) is None
    await worker.close()


async def test_a_direct_read_forges_no_event_of_another_role(world):
    """The server's reply goes to the subject that the reader names."""
    refused = []
    client = await world.client(refused)
    own = f"ps.{RUN}.trajectories.TurnSampled.forged"
    await client.request(own, encode(_verdict("x")))  # Stored once this returns.
    target = event_subject(RUN, _verdict("x"))
    stream, body = "PS_TRAJECTORIES", json.dumps({"last_by_subj": own}).encode()
    calls = [f"$JS.API.DIRECT.GET.{stream}", f"$JS.API.DIRECT.GET.{stream}.{own}"]
    for call, data in zip(calls, (body, b""), strict=True):
        await client.publish(call, data, reply=target)
    async with asyncio.timeout(10):
        while len(refused) < len(calls):
            await client.flush()
            await asyncio.sleep(0.01)
    assert await world.owner.last(Verdict) is None
    (receipt,) = await world.owner.publish([_verdict("x")])
    assert not receipt.is_duplicate
    await client.close()


async def test_a_consumer_that_judges_share_is_out_of_reach(world):
    name = durable_name(RUN, "judge")
    assert name in await world.durables()
    worker = await world.worker()
    for call in ("DELETE", "INFO", "DURABLE.CREATE"):
        with pytest.raises(DeniedError):
            await worker._connection.api(f"CONSUMER.{call}.PS_TRAJECTORIES.{name}", {})
    assert name in await world.durables()
    await worker.close()


async def test_users_words_and_streams_are_out_of_reach(world):
    worker = await world.worker()
    with pytest.raises(DeniedError):
        await worker.last(InferenceRecorded)
    for call in ("STREAM.DELETE.PS_REWARDS", "STREAM.PURGE.PS_REWARDS", "STREAM.NAMES"):
        with pytest.raises(DeniedError):
            await worker._connection.api(call, {})
    await worker.close()
