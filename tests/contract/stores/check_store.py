"""Conformance of object stores: what `ObjectStore` promises."""

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError, CorruptDataError, NotFoundError

CHECKS: list[Callable[[ObjectStore], Awaitable[None]]] = []


def check(function):
    CHECKS.append(function)
    return function


@check
async def what_was_put_is_got(store):
    await store.put("a/b.bin", memoryview(b"bytes"))
    await store.put("a/empty", b"")
    assert (await store.get("a/b.bin"), await store.get("a/empty")) == (b"bytes", b"")
    assert await store.exists("a/b.bin") and not await store.exists("a")


@check
async def an_object_is_immutable(store):
    await store.put("k", b"first")
    await store.put("k", b"first")
    with pytest.raises(CorruptDataError, match="'k'"):
        await store.put("k", b"other")
    assert await store.get("k") == b"first"


@check
async def a_missing_object_is_named(store):
    for key in ("nothing", "a/nothing"):
        with pytest.raises(NotFoundError, match=key):
            await store.get(key)


@check
async def a_deleted_object_is_gone_and_may_come_again(store):
    await store.put("k", b"first")
    await store.delete("k")
    await store.delete("k")
    assert not await store.exists("k")
    await store.put("k", b"second")
    assert await store.get("k") == b"second"


@check
async def keys_are_listed_by_prefix_in_order(store):
    for key in ("b/2", "b/1", "a", "ba", "b/c/3"):
        await store.put(key, b"")
    assert await store.keys("b/") == ["b/1", "b/2", "b/c/3"]
    assert await store.keys("") == ["a", "b/1", "b/2", "b/c/3", "ba"]
    assert await store.keys("x") == []


@check
async def a_large_object_comes_back_whole_and_in_order(store):
    data = np.random.default_rng(1).bytes(9_000_001)
    await store.put("big/object", data)
    assert await store.get("big/object") == data
    with pytest.raises(CorruptDataError, match="big/object"):
        await store.put("big/object", data[:-1])
    await store.delete("big/object")
    assert await store.keys("big/") == []


@check
async def of_many_writers_of_one_key_one_wins(store):
    """A head and its fencing tokens are claimed by a put."""
    outcomes = await asyncio.gather(
        *(store.put("slot", f"writer {n}".encode()) for n in range(6)), return_exceptions=True
    )
    assert outcomes.count(None) == 1
    assert all(isinstance(o, CorruptDataError) for o in outcomes if o is not None)
    assert (await store.get("slot")).decode() == f"writer {outcomes.index(None)}"


@check
async def many_objects_go_and_come_at_once(store):
    objects = {f"many/{n:02d}": bytes([n]) * n * 1000 for n in range(24)}
    await asyncio.gather(*(store.put(key, data) for key, data in objects.items()))
    assert await store.keys("many/") == sorted(objects)
    found = await asyncio.gather(*(store.get(key) for key in objects))
    assert found == list(objects.values())


@check
async def a_key_is_names_joined_by_slashes(store):
    for key in ("../x", "a/../../x", "/etc/x", "a//b", "", ".hidden", "a/", "a\0b", "a b"):
        for use in (store.get, store.exists, store.delete, lambda k: store.put(k, b"x")):
            with pytest.raises(ConfigError, match="object key"):
                await use(key)
    assert await store.keys("") == []
