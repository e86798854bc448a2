"""Versions that ranks upload on a trainer's request, also when ranks or attempts fail."""

import asyncio

import numpy as np
import pytest
from tests.sim.sync import rank_process

from penstock.actors.policy.snapshot import ShardedVersion, TensorRun
from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.core.version_head import StaleTokenError
from penstock.actors.relay.publish import rank_uploads
from penstock.actors.relay.publish.history import read_back
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.publish.rank_uploads import RankUploads
from penstock.actors.relay.publish.shard_uploader import HeldShardUploader
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest
from penstock.messages.errors import DeadlineError, NotFoundError
from penstock.messages.requests.ranks import rank_service
from penstock.messages.rpc import Ack

NUM_RANKS = 2


def weights(version):
    """Return the weights of a version, in bfloat16 and float32."""
    made = rank_process.weights(version)
    return made | {"scale": made["scale"].view(np.float32)}


def share(tensors, rank):
    """Return the part of every tensor that a rank holds."""
    runs = []
    for name, array in tensors.items():
        start, end = (array.size * number // NUM_RANKS for number in (rank, rank + 1))
        bits = array.reshape(-1)[start:end].view(f"u{array.itemsize}")
        runs.append(TensorRun(name, start, bits))
    return runs


class Ranks:
    """The ranks' uploaders, behind what stands for the bus."""

    def __init__(self):
        self.store = MemoryStore()
        self.tensors = {}
        self.num_asked = 0
        self.num_deaf = 0
        self._uploaders = {}
        for rank in range(NUM_RANKS):
            self.start(rank)

    def start(self, rank):
        uploader = HeldShardUploader(StoreIO(self.store), rank, NUM_RANKS)
        self._uploaders[rank_service(rank)] = rank, uploader

    async def ask(self, service, message, *, idle_s):
        self.num_asked += 1
        if self.num_deaf:
            self.num_deaf -= 1
            raise DeadlineError(f"{service}: no reply")
        rank, uploader = self._uploaders[service]
        await uploader.upload(message, share(self.tensors, rank))
        yield Ack()


@pytest.fixture
def ranks():
    return Ranks()


def uploads_of(ranks):
    return RankUploads(ranks.store, NUM_RANKS, ranks.ask, rank_service)


async def publish(ranks, uploads, version, tensors=None):
    ranks.tensors = weights(version) if tensors is None else tensors
    shapes = {name: array.shape for name, array in ranks.tensors.items()}
    return await uploads.publish(ShardedVersion(version, shapes, {"scale"}, "{}", ()))


async def test_ranks_publish_the_digests_that_one_process_publishes(ranks):
    many, one = uploads_of(ranks), Publisher(StoreIO(MemoryStore()))
    for version in range(4):
        manifest = await publish(ranks, many, version)
        plain = await one.prepare(
            version, weights(version), optimizer_step=version, config_json="{}"
        )
        assert manifest.target_root_digest == plain.target_root_digest
        assert manifest.target_element_digest == plain.target_element_digest
        assert manifest.num_changed == plain.num_changed
        assert manifest.config_json == plain.config_json
    assert await publish(ranks, many, 3) == manifest
    flat, _ = await read_back(StoreIO(ranks.store, asyncio.sleep, asyncio.to_thread), 3)
    assert root_digest(flat.tensors) == root_digest(weights(3))


async def test_a_rank_that_is_away_is_asked_again_and_a_restarted_one_goes_on(ranks):
    uploads = uploads_of(ranks)
    await publish(ranks, uploads, 0)
    ranks.num_deaf = 3
    ranks.start(1)
    manifest = await publish(ranks, uploads, 1)
    assert manifest.target_root_digest == root_digest(weights(1))
    assert ranks.num_asked == 2 * NUM_RANKS + 3


async def test_a_restarted_trainer_publishes_a_version_again_and_the_next(ranks):
    first = uploads_of(ranks)
    for version in range(3):
        manifest = await publish(ranks, first, version)
    again = uploads_of(ranks)
    assert await publish(ranks, again, 2) == manifest
    assert (await publish(ranks, again, 3)).fencing_token == 2


async def test_a_rank_that_fails_ends_the_commit_with_its_words(ranks):
    with pytest.raises(NotFoundError, match="weights 4: not committed"):
        await publish(ranks, uploads_of(ranks), 5)


async def test_a_rank_that_never_answers_is_given_up(ranks, monkeypatch):
    monkeypatch.setattr(rank_uploads, "_NUM_REQUESTS_MAX", 2)
    ranks.num_deaf = 10**6
    with pytest.raises(DeadlineError, match=r"rank\.\d: no reply"):
        await publish(ranks, uploads_of(ranks), 0)


async def test_what_a_failed_attempt_left_is_not_committed_in_the_next_ones_place(
    ranks, monkeypatch
):
    """The swap fails when all uploads and verifications are there; then there are other weights."""
    uploads = uploads_of(ranks)
    await publish(ranks, uploads, 0)

    async def die(manifest):
        raise ConnectionResetError("no swap")

    with monkeypatch.context() as patch, pytest.raises(ConnectionResetError):
        patch.setattr(uploads._committer._history, "commit", die)
        await publish(ranks, uploads, 1, weights(9))
    manifest = await publish(ranks, uploads, 1)
    assert manifest.target_root_digest == root_digest(weights(1))
    assert (await publish(ranks, uploads, 2)).fencing_token == manifest.fencing_token == 2


async def test_a_trainer_that_was_taken_over_is_refused_during_the_newer_ones_attempt(ranks):
    old, new = uploads_of(ranks), uploads_of(ranks)
    await publish(ranks, old, 0)
    ask = ranks.ask

    async def ask_after_the_old_one(service, message, *, idle_s):
        for _ in range(2):
            with pytest.raises(StaleTokenError):
                await publish(ranks, old, 1, weights(7))
        ranks.tensors = weights(1)
        async for reply in ask(service, message, idle_s=idle_s):
            yield reply

    new._request = ask_after_the_old_one
    assert (await publish(ranks, new, 1)).target_root_digest == root_digest(weights(1))


async def test_a_rank_killed_after_its_verification_does_not_hold_up_the_version(ranks):
    """Its restarted self waits for a staged manifest that the commit has deleted."""
    uploads = uploads_of(ranks)
    await publish(ranks, uploads, 0)
    ask, num_killed = ranks.ask, 0

    async def ask_and_kill(service, message, *, idle_s):
        nonlocal num_killed
        async for reply in ask(service, message, idle_s=idle_s):
            if service != rank_service(1) or num_killed:
                yield reply
        if service == rank_service(1) and not num_killed:
            num_killed += 1
            while await ranks.store.keys("weights/00000001/delta/attempt"):
                await asyncio.sleep(0.01)
            ranks.start(1)
            raise DeadlineError("its last word was lost")

    uploads._request = ask_and_kill
    async with asyncio.timeout(30.0):
        await publish(ranks, uploads, 1)
        manifest = await publish(ranks, uploads, 2)
    assert manifest.target_root_digest == root_digest(weights(2))
    assert num_killed == 1


async def test_a_rank_that_works_for_ever_ends_at_a_versions_deadline(ranks, monkeypatch):
    monkeypatch.setattr(rank_uploads, "VERSION_S_MAX", 0.1)

    async def work_for_ever(service, message, *, idle_s):
        while True:
            yield Ack()
            await asyncio.sleep(0.01)

    ranks.ask = work_for_ever
    with pytest.raises(DeadlineError, match="2 of 2 ranks of weights 0 left no marker"):
        await publish(ranks, uploads_of(ranks), 0)
