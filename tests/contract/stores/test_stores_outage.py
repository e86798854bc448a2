"""A bucket whose server goes away: waited out, and told where it stays away."""

import asyncio
import itertools
from functools import partial

import pytest
from tests.s3_server import serving_bucket

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.core.version_head import NO_HEAD, read_head
from penstock.infra.stores import s3
from penstock.infra.stores.s3 import S3Store
from penstock.messages.errors import StoreUnreachableError

names = (f"g{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def s3_endpoint():
    with serving_bucket("bucket") as endpoint:
        yield endpoint


class Gate:
    """A way to a server that can be cut."""

    def __init__(self, endpoint):
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self.target = host, int(port)
        self.is_open = True
        self.num_refused = 0
        self.writers = []

    async def pass_on(self, reader, writer):
        self.writers.append(writer)
        if not self.is_open:
            self.num_refused += 1
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection(*self.target)
        self.writers.append(far_writer)
        await asyncio.gather(
            self.pump(reader, far_writer), self.pump(far_reader, writer), return_exceptions=True
        )

    async def pump(self, reader, writer):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
        writer.close()

    def cut(self):
        self.is_open = False
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()


@pytest.fixture
async def gate(s3_endpoint, monkeypatch):
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
        monkeypatch.setenv(f"AWS_{name}", "us-east-1")
    monkeypatch.setattr(s3, "_PAUSE_S", 0.02)
    gate = Gate(s3_endpoint)
    server = await asyncio.start_server(gate.pass_on, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    gate.open_store = partial(
        S3Store.open, "bucket", prefix=next(names), endpoint=f"http://127.0.0.1:{port}"
    )
    yield gate
    gate.cut()
    server.close()


async def test_a_bucket_that_goes_away_and_comes_back_is_waited_out_by_everything(gate):
    store = gate.open_store()
    for key in ("a/1", "a/2"):
        await store.put(key, b"held")
    gate.cut()
    work = [store.put("a/3", b"new"), store.get("a/1"), store.exists("a/1"), store.keys("a/"),
            store.delete("a/2"), read_head(store)]  # fmt: skip
    tasks = [asyncio.create_task(piece) for piece in work]
    while gate.num_refused < 20 * len(tasks):  # many more than a library's few attempts
        await asyncio.sleep(0.01)
        assert not any(task.done() for task in tasks)
    gate.is_open = True
    _, data, is_there, keys, _, head = await asyncio.gather(*tasks)
    assert (data, is_there, head) == (b"held", True, NO_HEAD)
    assert "a/1" in keys
    assert await store.keys("a/") == ["a/1", "a/3"]
    assert await store.get("a/3") == b"new"


async def test_a_bucket_that_stays_away_or_is_not_there_is_told(gate, s3_endpoint):
    store = gate.open_store(patience_s=0.05)
    gate.cut()
    for work in (store.put("a", b"x"), store.get("a"), store.keys(""), store.exists("a")):
        with pytest.raises(
            StoreUnreachableError, match=r"s3 bucket 'bucket' at http://127\.0\.0\.1"
        ):
            await work
    assert gate.num_refused >= 4
    nowhere = S3Store.open("nowhere", endpoint=s3_endpoint)
    for work in (nowhere.put("a", b"x"), nowhere.keys("")):
        with pytest.raises(StoreUnreachableError, match="404"):
            await work


async def test_an_attempt_that_is_repeated_is_logged_in_one_line_that_names_the_object(
    gate, caplog
):
    store = gate.open_store()
    await store.put("a/1", b"held")
    gate.cut()
    reading = asyncio.create_task(store.get("a/1"))
    while gate.num_refused < 3:
        await asyncio.sleep(0.01)
    gate.is_open = True
    assert await reading == b"held"
    lines = [each.getMessage() for each in caplog.records if each.name == s3.__name__]
    assert lines
    for line in lines:
        assert "object 'a/1': s3 bucket 'bucket'" in line
        assert s3._DETAILS not in line
        assert "\n" not in line


async def test_a_bucket_that_never_answers_ends_at_one_deadline(gate, monkeypatch):
    """The server takes connections and says nothing; a put that is patient itself adds nothing."""
    monkeypatch.setattr(s3, "_PATIENCE_S_MIN", 0.3)
    connections = []

    async def say_nothing(reader, writer):
        connections.append(writer)
        await reader.read()

    async with await asyncio.start_server(say_nothing, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        store = S3Store.open("bucket", endpoint=f"http://127.0.0.1:{port}", patience_s=0.3)
        with pytest.raises(StoreUnreachableError, match=rf"'a/1': s3 bucket .*:{port}"):
            await StoreIO(store).put_once("a/1", b"x")
        for writer in connections:
            writer.close()
    assert len(connections) <= 2
