"""Reads of many messages at once while nobody serves the stream: again, never "nothing there"."""

import contextlib

import pytest
from nats.aio.msg import Msg

from penstock.infra.bus.claims import Claims
from penstock.infra.bus.collector import Collector, collect_if_possible
from penstock.infra.bus.jetstream import puller
from penstock.infra.bus.jetstream.connection import LOST
from penstock.infra.bus.jetstream.log_reader import read_raw
from penstock.infra.bus.jetstream.puller import read_batch
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.base import Stream

STORED = {
    "Nats-Sequence": "7",
    "Nats-Subject": "ps.r1.training.A.b",
    "Nats-Time-Stamp": "2026-01-01T00:00:00Z",
}


class Connection:
    """Answers each read with the next of `answers`, None with silence."""

    def __init__(self, *answers: list[Msg] | None) -> None:
        self._answers = list(answers)
        self._put = print

    @contextlib.contextmanager
    def replies(self, put, on_break):
        self._put = put
        yield "inbox"

    async def wait_connected(self):
        pass

    async def send(self, subject, data, *, reply):
        for message in self._answers.pop(0) or []:
            self._put(message)

    async def api(self, call, body):
        return {"state": {"last_seq": 7}}


def message(data: bytes = b"", **headers: str) -> Msg:
    return Msg(_client=None, subject="inbox", data=data, headers=headers)


def ended(status: str) -> Msg:
    return message(Status=status)


async def test_a_stream_that_nobody_serves_is_not_empty(monkeypatch):
    monkeypatch.setattr(puller, "IDLE_S", 0.01)
    for answer in ([ended("503")], None):
        with pytest.raises(LOST):
            await read_batch(Connection(answer), "PS_TRAINING", ">", 1, 9)
    assert await read_batch(Connection([ended("404")]), "PS_TRAINING", ">", 1, 9) == []


async def test_a_log_is_read_to_its_end_through_an_outage(monkeypatch):
    """What is named there would be collected as unnamed, else."""
    monkeypatch.setattr(puller, "IDLE_S", 0.01)
    stored = [message(b"x", **STORED), ended("204")]
    connection = Connection([ended("503")], None, stored)
    claims = Claims(MemoryStore(), str)
    read = [raw async for raw in read_raw(connection, claims, "r1", Stream.TRAINING)]
    assert [(raw.sequence, raw.data) for raw in read] == [(7, b"x")]


class Away(MemoryStore):
    async def keys(self, prefix):
        raise TimeoutError


async def test_a_collection_that_fails_ends_no_run(caplog):
    """It ended the launcher before, and at a run's end its closing table was not written."""
    await collect_if_possible(Collector(None, Away()))
    assert "were not collected" in caplog.text
