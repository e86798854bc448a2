"""A request at a replica that is lost while its replies are there already."""

import asyncio
import contextlib

import numpy as np
import pytest

from penstock.actors.policy.replicas.client import ReplicaLostError, stream_chunks
from penstock.actors.policy.replicas.table import SILENT_S, ReplicaTable
from penstock.kernels.arrays import to_array
from penstock.messages.generation import Generate, ReplicaReported, TokensSampled
from penstock.messages.task import Purpose, Sampling

CHUNK = TokensSampled(
    request_id="r",
    token_ids=to_array(np.zeros(1, np.int32)),
    behavior_logprobs=to_array(np.zeros(1, np.float32)),
    policy_version=0,
)
REQUEST = Generate(
    request_id="r",
    session_id="s",
    purpose=Purpose.TRAIN,
    token_ids=to_array(np.zeros(1, np.int32)),
    sampling=Sampling(seed=0, num_tokens_max=4),
)


class Ready:
    """A context whose replies are there at once."""

    def waiting(self, target, reason, *, deadline_s):
        return contextlib.nullcontext()

    async def stream_request(self, service, message, **_):
        while True:
            yield CHUNK


async def test_a_lost_replica_is_told_of_before_the_next_chunk_and_without_noise() -> None:
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, c: faults.append(c["message"]))
    table = ReplicaTable()
    report = ReplicaReported(
        region="west", replica="west", started_at=1.0, serves=[Purpose.TRAIN], policy_version=0
    )
    table.add(report, 0.0)
    chunks = stream_chunks(Ready(), table, REQUEST, set(), idle_s=5.0, reason="test")
    async with contextlib.aclosing(chunks):
        assert await anext(chunks) == CHUNK
        table.expire(SILENT_S + 1.0)
        with pytest.raises(ReplicaLostError, match="the replica is gone"):
            await anext(chunks)
    await asyncio.sleep(0)
    assert faults == []
