"""Conformance of object stores: what `ObjectStore` promises."""

from collections.abc import Awaitable, Callable

import pytest

from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CorruptDataError, NotFoundError

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
