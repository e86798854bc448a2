"""Attempts of publishing ranks that come to nothing, or too late: none stands in for another."""

import asyncio
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from tests.sim.sync.rank_process import weights
from tests.sim.sync.test_sync_publisher_ranks import Ranks, prepare, publisher

from penstock.actors.relay.core.flat_snapshot import tensor_table
from penstock.actors.relay.core.version_head import StaleTokenError
from penstock.actors.relay.publish import multi_rank_publisher, rank_actor
from penstock.actors.relay.publish.handover import Handover
from penstock.infra.stores.memory import MemoryStore
from penstock.kernels.digest import root_digest
from penstock.messages.errors import DeadlineError
from penstock.messages.rpc import Ack, RemoteError, RemoteErrorKind
from penstock.messages.weights import UploadWeights


@pytest.fixture
async def ranks(tmp_path):
    made = Ranks(MemoryStore(), tmp_path)
    for rank in range(2):
        await made.start(rank)
    return made


async def test_what_a_failed_attempt_left_is_not_committed_in_the_next_ones_place(
    ranks, monkeypatch
):
    """The swap fails when all uploads and verifications are there; then there are other weights."""
    target = publisher(ranks)
    await prepare(target, 0)
    history = target._uploads._committer._history

    async def die(manifest):
        raise ConnectionResetError("no swap")

    with monkeypatch.context() as patch, pytest.raises(ConnectionResetError):
        patch.setattr(history, "commit", die)
        await prepare(target, 1, weights(9))
    manifest = await prepare(target, 1)
    assert manifest.target_root_digest == root_digest(weights(1))
    assert (await prepare(target, 2)).fencing_token == manifest.fencing_token == 2


async def test_a_trainer_that_was_taken_over_writes_into_nobodys_weights(ranks):
    """It comes when the newer one has handed over, and before the ranks have read."""
    old, new = publisher(ranks), publisher(ranks)
    await prepare(old, 0)
    ask = ranks.ask

    async def ask_after_the_old_one(service, message, *, idle_s):
        for _ in range(2):
            with pytest.raises(StaleTokenError):
                await prepare(old, 1, weights(7))
        Handover(ranks.folder / "handover", 1, tensor_table(weights(7))).write(weights(7))
        async for reply in ask(service, message, idle_s=idle_s):
            yield reply

    new._uploads._request = ask_after_the_old_one
    assert (await prepare(new, 1)).target_root_digest == root_digest(weights(1))


async def test_a_rank_killed_after_its_verification_does_not_hold_up_the_version(ranks):
    """Its restarted self waits for a staged manifest that the commit has deleted."""
    target = publisher(ranks)
    await prepare(target, 0)
    ask, num_killed = ranks.ask, 0

    async def ask_and_kill(service, message, *, idle_s):
        nonlocal num_killed
        async for reply in ask(service, message, idle_s=idle_s):
            if service != "upload.1" or num_killed:
                yield reply
        if service == "upload.1" and not num_killed:
            num_killed += 1
            while await ranks.store.keys("weights/00000001/delta/attempt"):
                await asyncio.sleep(0.01)
            await ranks.start(1)
            raise DeadlineError("its last word was lost")

    target._uploads._request = ask_and_kill
    async with asyncio.timeout(30.0):
        await prepare(target, 1)
        assert (await prepare(target, 2)).target_root_digest == root_digest(weights(2))
    assert num_killed == 1


async def test_a_message_under_an_older_token_does_not_end_a_newer_attempt(ranks, monkeypatch):
    monkeypatch.setattr(rank_actor, "_BEAT_S", 0.01)
    table = tensor_table(weights(0))
    serve = ranks.actors["upload.0"]
    Handover(ranks.folder / "handover", 2, table).write(weights(0))

    def upload(token):
        return UploadWeights(
            policy_version=0,
            fencing_token=token,
            attempt=f"under {token}",
            tensor_table=msgspec.msgpack.encode(table),
        )

    newer = serve(upload(2))
    assert await anext(newer) == Ack()
    (refusal,) = [reply async for reply in serve(upload(1))]
    assert isinstance(refusal, RemoteError) and refusal.kind is RemoteErrorKind.GONE
    assert await anext(newer) == Ack()
    await serve.__self__.stop(None)


def test_a_token_takes_the_place_of_older_ones_and_leaves_newer_ones_alone(tmp_path):
    tensors = {"a": np.arange(3, dtype=np.uint8)}
    for token in (1, 3, 2):
        Handover(tmp_path, token, tensor_table(tensors)).write(tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000002", "00000003"]


WRITE = """
import numpy as np
from pathlib import Path
from penstock.actors.relay.publish.handover import Handover
from penstock.actors.relay.core.flat_snapshot import tensor_table
tensors = {"a": np.ones(1 << 20, np.uint16)}
try:
    Handover(Path("."), 1, tensor_table(tensors)).write(tensors)
except OSError as error:
    print(error.errno, list(Path(".").iterdir()))
"""


def test_a_handover_that_the_disk_has_no_room_for_is_an_error_and_kills_nobody(tmp_path):
    mount = 'mount -t tmpfs -o size=64k none "$0" && cd "$0" && exec "$@"'
    inside = ["unshare", "-m", "sh", "-c", mount, str(tmp_path)]
    if subprocess.run([*inside, "true"], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("no mounts of one's own here")
    command = [*inside, sys.executable, "-c", WRITE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "28 []\n"), done.stderr


async def test_a_rank_that_works_for_ever_ends_at_a_versions_deadline(ranks, monkeypatch):
    monkeypatch.setattr(multi_rank_publisher, "VERSION_S_MAX", 0.1)

    async def work_for_ever(service, message, *, idle_s):
        while True:
            yield Ack()
            await asyncio.sleep(0.01)

    ranks.ask = work_for_ever
    with pytest.raises(DeadlineError, match="2 of 2 ranks of weights 0 left no marker"):
        await prepare(publisher(ranks), 0)
