"""Object stores pass `check_store`, the real ones over real files and sockets."""

import asyncio
import errno
import itertools
from functools import partial

import pytest
from tests.contract.stores.check_store import CHECKS
from tests.s3_server import serving_bucket

from penstock.infra.bus.server.server import EmbeddedServer
from penstock.infra.stores import directory
from penstock.infra.stores.directory import DirectoryStore
from penstock.infra.stores.jetstream import SMALL_BYTES, JetStreamStore
from penstock.infra.stores.memory import MemoryStore
from penstock.infra.stores.s3 import S3Store
from penstock.messages.errors import CorruptDataError, StoreFullError, StoreUnreachableError

names = (f"b{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def nats_url(tmp_path_factory):
    server = EmbeddedServer(store_dir=tmp_path_factory.mktemp("nats"))
    with asyncio.Runner() as runner:
        runner.run(server.start())
        yield server.url
        runner.run(server.stop())


@pytest.fixture(scope="module")
def s3_endpoint():
    with serving_bucket("bucket") as endpoint:
        yield endpoint


@pytest.fixture(params=["directory", "memory", "jetstream", "s3"])
def open_store(request, tmp_path, monkeypatch):
    """Give the function that opens an empty store of a kind."""
    match request.param:
        case "directory":
            return partial(_ready, DirectoryStore(tmp_path / "objects"))
        case "memory":
            return partial(_ready, MemoryStore())
        case "jetstream":
            url = request.getfixturevalue("nats_url")
            return partial(JetStreamStore.connect, url, next(names))
        case "s3":
            for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "REGION"):
                monkeypatch.setenv(f"AWS_{name}", "us-east-1")
            endpoint = request.getfixturevalue("s3_endpoint")
            return partial(_ready, S3Store.open("bucket", prefix=next(names), endpoint=endpoint))


async def _ready(store):
    return store


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_conforms(check, open_store):
    store = await open_store()
    if isinstance(store, S3Store) and check.__name__ == "of_many_writers_of_one_key_one_wins":
        pytest.skip("the test's S3 server looks and then writes, without a lock between")
    try:
        await check(store)
    finally:
        if isinstance(store, JetStreamStore):
            await store.close()


async def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    store = DirectoryStore(tmp_path)

    def full(path, data, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(directory, "write_atomic", full)
    with pytest.raises(StoreFullError, match="No space left"):
        await store.put("k", b"x")
    monkeypatch.undo()
    assert not await store.exists("k")
    await store.put("k", b"y")
    assert await store.get("k") == b"y"


async def test_of_two_writers_at_once_one_wins(tmp_path, monkeypatch):
    """Both looked before either wrote."""
    store = DirectoryStore(tmp_path)
    await store.put("token", b"first")
    monkeypatch.setattr(directory.Path, "is_file", lambda path: False)
    await store.put("token", b"first")
    with pytest.raises(CorruptDataError, match="'token'"):
        await store.put("token", b"second")
    monkeypatch.undo()
    assert await store.get("token") == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


async def test_a_full_bucket_says_so_and_takes_the_object_once_there_is_room(nats_url):
    store = await JetStreamStore.connect(nats_url, next(names), num_bytes_max=1 << 20)
    try:
        await store.put("a", bytes(700_000))
        with pytest.raises(StoreFullError, match="'b'"):
            await store.put("b", bytes(700_001))
        assert await store.keys("") == ["a"]
        await store.delete("a")
        await store.put("b", bytes(700_001))
        assert await store.get("b") == bytes(700_001)
    finally:
        await store.close()


async def test_a_damaged_chunk_in_a_bucket_is_told(nats_url):
    store = await JetStreamStore.connect(nats_url, next(names))
    try:
        await store.put("a", bytes(700_000))
        await store._connection.api(f"STREAM.MSG.DELETE.{store._stream}", {"seq": 2})
        with pytest.raises(CorruptDataError, match="chunks"):
            await store.get("a")
    finally:
        await store.close()


async def test_a_small_object_comes_from_a_bucket_by_one_request(nats_url, monkeypatch):
    store = await JetStreamStore.connect(nats_url, next(names))
    try:
        for size in (0, SMALL_BYTES, SMALL_BYTES + 1):
            await store.put(f"size-{size}", b"x" * size)
        monkeypatch.setattr(store, "_chunks", None)
        for size in (0, SMALL_BYTES):
            assert await store.get(f"size-{size}") == b"x" * size
        with pytest.raises(TypeError):
            await store.get(f"size-{SMALL_BYTES + 1}")
    finally:
        await store.close()


async def test_a_bucket_is_what_other_clients_of_nats_read_and_write(nats_url):
    nats = pytest.importorskip("nats")
    bucket = next(names)
    store = await JetStreamStore.connect(nats_url, bucket)
    client = await nats.connect(nats_url)
    try:
        theirs = await client.jetstream().object_store(bucket)
        await store.put("ours/x", b"1" * 600_000)
        assert (await theirs.get("ours/x")).data == b"1" * 600_000
        await store.put("ours/small", b"3" * 300)
        assert (await theirs.get("ours/small")).data == b"3" * 300
        await theirs.put("theirs/y", b"2" * 300_000)
        assert await store.get("theirs/y") == b"2" * 300_000
        assert await store.keys("") == ["ours/small", "ours/x", "theirs/y"]
    finally:
        await client.close()
        await store.close()


async def test_an_s3_server_that_is_away_is_a_typed_error(monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    pytest.importorskip("obstore")
    store = S3Store.open("b", endpoint="http://127.0.0.1:9", patience_s=0.0)
    for use in (store.get("k"), store.put("k", b""), store.keys("")):
        with pytest.raises(StoreUnreachableError):
            await use
