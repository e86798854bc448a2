"""Where groups go: once, together, near their image, within bounds."""

import random

import pytest

from penstock.actors.scheduler.host_registry import (
    HOST_SILENCE_S,
    SOFT_CAP,
    HostRegistry,
    HostsFullError,
)
from penstock.messages.requests.scheduler import HeldGroup


def registry_of(num_hosts, num_slots=64, **options):
    registry = HostRegistry(random.Random(7), **options)
    for number in range(num_hosts):
        registry.report(f"h{number}", num_slots=num_slots, num_live=0, images=[], now=0.0)
    return registry


def place(registry, group_id, num_machines=16, image="", holder="a", now=0.0, avoid=""):
    return registry.place(
        group_id, num_machines=num_machines, image=image, holder=holder, lease_s=60.0, now=now,
        avoid=avoid,
    )  # fmt: skip


def test_a_group_that_asks_again_keeps_its_host():
    registry = registry_of(8)
    hosts = {place(registry, "g").host for _ in range(20)}
    assert len(hosts) == 1
    assert registry.num_placed == 16


def test_no_host_gets_more_than_it_has_room_for():
    registry = registry_of(4, num_slots=40)
    placed = [place(registry, f"g{i}").host for i in range(8)]  # 2 of 16 fit into 40
    assert sorted(placed.count(f"h{i}") for i in range(4)) == [2, 2, 2, 2]
    with pytest.raises(HostsFullError, match="no room for 16 machines on 4 hosts"):
        place(registry, "late")
    registry.release("g0")
    assert place(registry, "late").host == placed[0]


def test_groups_go_where_their_image_is_but_never_beyond_the_soft_cap():
    registry = registry_of(20, num_slots=320)
    groups = [place(registry, f"g{i}", image=f"i{i % 10}") for i in range(200)]
    assert sum(group.has_image for group in groups) > 100
    share = registry.num_placed / 20
    loads = [sum(g.num_machines for g in groups if g.host == f"h{i}") for i in range(20)]
    assert max(loads) <= SOFT_CAP * share + 2 * 16  # two choices: a group or two above the mean
    one_image = registry_of(20, num_slots=320)
    popular = [place(one_image, f"g{i}", image="i") for i in range(200)]
    assert len({group.host for group in popular}) == 20


def test_what_hosts_report_counts_beside_what_was_placed():
    registry = registry_of(2)
    registry.report("h0", num_slots=64, num_live=60, images=[], now=0.0)
    assert place(registry, "g").host == "h1"


def test_a_host_that_reports_an_image_is_preferred():
    registry = registry_of(50)
    registry.report("h9", num_slots=64, num_live=0, images=["i"], now=0.0)
    placement = place(registry, "g", image="i")
    assert (placement.host, placement.has_image) == ("h9", True)


def test_a_host_that_gave_an_image_up_is_no_holder_any_more():
    registry = registry_of(50)
    registry.report("h9", num_slots=64, num_live=0, images=["i"], now=0.0)
    registry.report("h9", num_slots=64, num_live=0, images=[], now=1.0)
    assert not place(registry, "g", image="i").has_image


def test_the_room_of_a_group_that_came_and_went_between_two_reports_ends():
    registry = registry_of(1)
    place(registry, "g", num_machines=16)
    gone = [HeldGroup(group_id=name, holder="a", num_machines=0) for name in ("g", "unknown")]
    registry.report("h0", num_slots=64, num_live=0, groups=gone, now=1.0)
    assert (registry.num_placed, registry.knows("unknown")) == (16, False)
    registry.report("h0", num_slots=64, num_live=0, now=2.0)
    assert registry.num_placed == 0


def test_an_image_on_its_way_to_a_host_counts_before_the_host_reports_it():
    registry = registry_of(4, num_slots=640)
    first = place(registry, "g", image="i", num_machines=1)
    place(registry, "other", num_machines=16, avoid=first.host)
    registry.report(first.host, num_slots=640, num_live=0, images=[], now=1.0)
    again = place(registry, "g2", image="i", num_machines=1)
    assert (again.host, again.has_image) == (first.host, True)


def test_a_quota_bounds_one_holder_and_no_other():
    registry = registry_of(8, quota=32)
    place(registry, "g0")
    place(registry, "g1")
    with pytest.raises(HostsFullError, match="quota of 32"):
        place(registry, "g2")
    place(registry, "g3", holder="b")
    registry.release("g0")
    registry.release("g0")
    place(registry, "g2")


def test_a_holders_own_quota_stands_in_place_of_the_common_one():
    registry = registry_of(8, quota=32, quotas={"eval": 16, "train": 0})
    for number in range(4):
        place(registry, f"t{number}", holder="train")
    place(registry, "e0", holder="eval")
    with pytest.raises(HostsFullError, match="eval: 16 more exceed its quota of 16"):
        place(registry, "e1", holder="eval")


def test_what_nobody_renews_and_who_falls_silent_are_forgotten():
    registry = registry_of(2)
    place(registry, "late", now=0.0)
    kept = place(registry, "kept", now=0.0)
    registry.report(kept.host, num_slots=64, num_live=0, images=[], now=61.0)
    place(registry, "kept", now=30.0)
    assert registry.expire(now=61.0) == 2  # the other host, and the group "late"
    assert registry.num_hosts == 1
    assert registry.num_placed == 16
    assert registry.expire(now=61.0 + HOST_SILENCE_S + 1) == 2
    with pytest.raises(HostsFullError, match="0 hosts"):
        place(registry, "g", now=70.0)


def test_a_group_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least 1"):
        place(registry_of(1), "g", num_machines=0)


@pytest.mark.parametrize("lease_s", [0.0, -5.0, float("nan"), float("inf"), 1e18])
def test_room_for_ever_is_refused(lease_s):
    registry = registry_of(1)
    with pytest.raises(ValueError, match="lease_s: expected 0 < x"):
        registry.place("g", num_machines=1, image="", holder="a", lease_s=lease_s, now=0.0)
    assert registry.num_placed == 0


def held(group_id, num_machines=16, holder="a"):
    return HeldGroup(group_id=group_id, holder=holder, num_machines=num_machines)


def test_room_ends_when_its_host_holds_the_group_no_more():
    registry = registry_of(1)
    place(registry, "g")
    report = {"num_slots": 64, "num_live": 0, "now": 1.0}
    registry.report("h0", **report)  # Its machines are not there yet.
    assert registry.num_placed == 16
    registry.report("h0", **{**report, "num_live": 16}, groups=[held("g")])
    registry.report("h0", **report)
    assert registry.num_placed == 0


def test_a_group_that_a_host_holds_keeps_its_room_beyond_its_lease():
    registry = registry_of(1)
    place(registry, "g")
    for now in range(0, 120, 4):
        registry.report("h0", num_slots=64, num_live=16, now=now, groups=[held("g")])
        assert registry.expire(now) == 0
    assert registry.num_placed == 16


def test_empty_books_are_filled_from_what_hosts_hold():
    registry = registry_of(4, quota=32)
    registry.report("h3", num_slots=64, num_live=20, now=0.0, groups=[held("g")])
    assert place(registry, "g").host == "h3"
    assert registry.num_placed == 16
    place(registry, "g1")
    with pytest.raises(HostsFullError, match="quota of 32"):
        place(registry, "g2")


def test_a_group_moves_from_a_host_to_be_avoided_and_never_to_it():
    registry = registry_of(3)
    for number in range(50):
        first = place(registry, f"g{number}").host
        moved = registry.place(
            f"g{number}", num_machines=16, image="", holder="a", lease_s=60.0, now=0.0, avoid=first
        )
        assert moved.host != first
        registry.release(f"g{number}")
        registry.report(first, num_slots=64, num_live=0, now=0.0)
    assert registry.num_placed == 0


def test_a_host_that_did_not_answer_one_gets_nothing_new_of_anybody_until_it_reports():
    registry = registry_of(4, num_slots=640)
    first = place(registry, "g", image="i").host
    place(registry, "g", image="i", avoid=first)
    hosts = {place(registry, f"g{n}", num_machines=1, image=f"i{n % 2}").host for n in range(50)}
    assert len(hosts) > 1 and first not in hosts
    registry.report(first, num_slots=640, num_live=0, now=1.0)
    assert first in {place(registry, f"more-{n}", num_machines=1).host for n in range(50)}


def test_a_group_held_on_two_hosts_has_one_place_and_the_others_count_as_load():
    registry = registry_of(2)
    first = place(registry, "g").host
    other = "h1" if first == "h0" else "h0"
    registry.report(other, num_slots=64, num_live=16, now=0.0, groups=[held("g")])
    assert place(registry, "g").host == first
    place(registry, "x", num_machines=48)
    with pytest.raises(HostsFullError):
        place(registry, "y", num_machines=49)


def test_books_hold_nothing_of_what_ended():
    registry = registry_of(1)
    for number in range(100):
        place(registry, f"g{number}", image=f"image-{number}", holder=f"judge.{number}")
        registry.release(f"g{number}")
        registry.report("h0", num_slots=64, num_live=0, now=0.0)
    place(registry, "last", image="image-0", holder="judge.0")
    registry.expire(1000.0)
    books = (
        registry._placements,
        registry._by_holder,
        registry._holders,
        registry.hosts,
        registry.names,
    )
    assert [len(book) for book in books] == [0] * len(books)
