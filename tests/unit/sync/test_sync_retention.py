"""What is made, what is kept, and for whom."""

import pytest

from penstock.actors.relay.core.leases import leased, leased_versions
from penstock.actors.relay.region.retention import (
    NUM_FULL_KEPT,
    UpdateEdge,
    due,
    floor,
    is_kept,
)
from penstock.infra.stores.memory import MemoryStore
from penstock.messages.errors import StoreFullError
from penstock.messages.weights import SnapshotKind, WeightsPublished

FULL, DELTA, MERGED = SnapshotKind.FULL, SnapshotKind.DELTA, SnapshotKind.MERGED


def manifest(version, kind=DELTA, base=None):
    base = {FULL: -1, DELTA: version - 1}.get(kind, base)
    return WeightsPublished(
        policy_version=version, base_version=base, kind=kind, optimizer_step=version,
        fencing_token=1, representation="bf16", base_root_digest="", target_root_digest="",
        num_params=1, num_changed=1, full_bytes=2, shards=[],
    )  # fmt: skip


def held(newest):
    """Return what a store holds that made everything as it came."""
    manifests = [manifest(0, FULL)]
    for version in range(1, newest + 1):
        manifests.append(manifest(version))
        for edge in due(manifests, version):
            manifests.append(manifest(edge.policy_version, edge.kind, edge.base_version))
    return manifests


def test_folds_and_anchors_come_due_at_their_versions():
    assert due(held(7), 7) == []
    assert due([manifest(0, FULL)], 8) == [UpdateEdge(8, MERGED, 0)]
    at_64 = due(held(63), 64)
    merged = [UpdateEdge(64, MERGED, base) for base in (56, 32, 0)]
    assert at_64 == [*merged, UpdateEdge(64, FULL, -1)]
    assert due(held(64), 64) == []


def test_after_a_jump_only_what_will_be_kept_is_made():
    edges = due([manifest(0, FULL), manifest(203)], 203)
    assert min(edge.policy_version for edge in edges) == 136
    assert [edge for edge in edges if edge.kind is FULL] == [UpdateEdge(192, FULL, -1)]


@pytest.mark.parametrize(
    ("newest", "needed", "expected"),
    [(5, [], 0), (70, [], 0), (130, [], 64), (200, [], 128), (200, [130], 128), (200, [128], 128),
     (200, [127], 64), (200, [3], 0), (200, [150, 64], 64)],
)  # fmt: skip
def test_the_floor_is_an_anchor_that_all_who_need_something_can_start_from(
    newest, needed, expected
):
    assert floor(held(newest), needed) == expected


def test_nothing_at_the_floor_or_after_it_is_deleted():
    manifests = held(200)
    oldest = floor(manifests, [])
    edges = [UpdateEdge(m.policy_version, m.kind, m.base_version) for m in manifests]
    kept = [edge for edge in edges if is_kept(edge, oldest)]
    full_versions = [edge.policy_version for edge in kept if edge.kind is FULL]
    assert full_versions == [128, 192] and len(full_versions) == NUM_FULL_KEPT
    assert {edge.policy_version for edge in kept if edge.kind is DELTA} == set(range(129, 201))
    assert all(edge.base_version >= 128 for edge in kept if edge.kind is MERGED)


def test_an_empty_store_has_no_floor():
    assert floor([], [3]) == -1


async def test_a_lease_holds_until_it_is_given_back_or_runs_out():
    store = MemoryStore()
    async with leased(store, "west-0", 64, now=1_700_000_000.0):
        async with leased(store, "evaluator", 7, now=1_700_000_000.0, lease_s=10.0):
            assert await leased_versions(store, 1_700_000_005.0) == {7, 64}
            assert await leased_versions(store, 1_700_000_011.0) == {64}
            assert len(await store.keys("leases/")) == 1
        assert await leased_versions(store, 1_700_000_301.0) == set()
    assert await store.keys("") == []


async def test_who_dies_with_a_lease_keeps_nothing_for_ever():
    store = MemoryStore()
    await store.put("leases/dead/00000003-1700000000", b"")
    await store.put("leases/odd/name", b"")
    assert await leased_versions(store, 1_700_000_001.0) == set()
    assert await store.keys("") == []


async def test_a_store_without_room_for_a_lease_still_lets_read():
    store = MemoryStore()

    async def full(key, data):
        raise StoreFullError("no room")

    store.put = full
    async with leased(store, "west-0", 1, now=1_700_000_000.0):
        assert await store.keys("") == []
