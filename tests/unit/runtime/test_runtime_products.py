"""Kept products: checked, bounded, and made again where one is damaged."""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.actors.runtime import products
from penstock.actors.runtime.products import ProductCache, source_digest


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return tmp_path / "things"


def test_it_returns_what_was_put_by_its_key_alone(folder):
    ProductCache("things").put("a", b"one")
    assert ProductCache("things").get("a") == b"one"
    assert ProductCache("things").get("b") is None
    assert ProductCache("others").get("a") is None
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [b"", b"onf", b"one and more"])
def test_a_damaged_entry_is_deleted_and_can_be_made_again(folder, damage):
    cache = ProductCache("things")
    cache.put("a", b"one")
    [entry] = folder.iterdir()
    entry.write_bytes(damage)
    assert cache.get("a") is None and list(folder.iterdir()) == []
    cache.put("a", b"one")
    assert cache.get("a") == b"one"


def test_the_least_recently_used_entries_go_first(folder):
    cache = ProductCache("things", num_max=3)
    for age, key in ((40, "a"), (30, "b"), (20, "c")):
        cache.put(key, key.encode())
        [entry] = folder.glob(f"{key}-*")
        os.utime(entry, (time.time() - age,) * 2)
    assert cache.get("a") == b"a", "used, so it is no longer the oldest"
    cache.put("d", b"d")
    assert [key for key in "abcd" if cache.get(key)] == ["a", "c", "d"]


def test_its_bytes_are_bounded(folder):
    cache = ProductCache("things", bytes_max=10)
    cache.put("large", bytes(11))
    assert not folder.exists()
    for key in "abc":
        cache.put(key, key.encode() * 4)
        [entry] = folder.glob(f"{key}-*")
        os.utime(entry, (time.time() - 30 + ord(key) - ord("a"),) * 2)
    assert sum(path.stat().st_size for path in folder.iterdir()) == 8
    assert cache.get("a") is None


def test_what_a_killed_writer_left_is_deleted_once_it_is_old(folder):
    cache = ProductCache("things")
    cache.put("a", b"one")
    old, new = folder / ".b-1.x", folder / ".b-2.x"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    cache.put("c", b"two")
    assert not old.exists() and new.exists()


def test_many_writers_and_readers_at_once(folder):
    cache = ProductCache("things", num_max=2)

    def work(number: int) -> bool:
        key = "abcd"[number % 4]
        cache.put(key, key.encode() * 1000)
        return cache.get(key) in (key.encode() * 1000, None)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))
    assert len(list(folder.iterdir())) <= 2 + 8


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file"))
    cache = ProductCache("things")
    cache.put("a", b"one")
    assert cache.get("a") is None


@pytest.mark.parametrize("name", ["a.py", "b/a.c", "a.h", "a.cu", "a.cuh"])
def test_the_digest_of_code_is_of_every_source(tmp_path, monkeypatch, name):
    monkeypatch.setattr(products, "_PACKAGE", tmp_path)
    source = tmp_path / "code" / name
    source.parent.mkdir(parents=True)
    digests = set()
    for text in ("one", "two"):
        source.write_text(text)
        source_digest.cache_clear()
        digests.add(source_digest("code"))
    source_digest.cache_clear()
    assert len(digests) == 2
