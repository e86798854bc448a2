"""A simulated host leases as a real one does: once for each id, within its room, until reaped."""

import pytest
from tests.lab.simulate.sandboxes.host import SimulatedHost
from tests.lab.simulate.sandboxes.settings import BurstScenario

from penstock.messages.sandbox import AcquireGroup

SCENARIO = BurstScenario(num_machines=64, num_hosts=2, num_slots=40, num_failures=0, num_cores=8)


def wanted(group_id: str, lease_s: float = 10.0) -> AcquireGroup:
    ids = [f"{group_id}.{n}" for n in range(16)]
    return AcquireGroup(group_id=group_id, holder="test", lease_ids=ids, lease_s=lease_s)


def test_asking_again_creates_nothing_and_changes_nothing_but_the_lease():
    host = SimulatedHost("h0", SCENARIO)
    first = host.acquire(wanted("a"), "i", now=0.0)
    ready_at, records = first.ready_at, first.records
    again = host.acquire(wanted("a"), "i", now=5.0)
    assert (again.ready_at, again.records) == (ready_at, records)
    assert again.expires_at == 15.0
    assert host.num_created == host.num_live == 16


def test_a_full_host_gives_none_of_a_group():
    host = SimulatedHost("h0", SCENARIO)
    assert host.acquire(wanted("a"), "i", now=0.0)
    assert host.acquire(wanted("b"), "i", now=0.0)
    assert host.acquire(wanted("c"), "i", now=0.0) is None
    assert host.num_live == 32


def test_what_nobody_renews_is_reaped_and_then_gone():
    host = SimulatedHost("h0", SCENARIO)
    host.acquire(wanted("a"), "i", now=0.0)
    host.acquire(wanted("b"), "i", now=0.0)
    assert host.renew(["a", "c"], now=9.0) == ["c"]
    host.reap(now=12.0)
    assert list(host.groups) == ["a"]
    assert host.renew(["a", "b"], now=12.0) == ["b"]
    [report] = host.report().groups
    assert (report.group_id, report.num_machines) == ("a", 16)


def test_an_image_is_paged_in_once_and_cores_boot_one_machine_at_a_time():
    host = SimulatedHost("h0", SCENARIO)
    first = host.acquire(wanted("a"), "i", now=0.0)
    second = host.acquire(wanted("b"), "i", now=100.0)
    boots_s = sorted(record.boot_ms / 1e3 for record in second.records)
    assert second.ready_at - 100.0 >= boots_s[0] + boots_s[1]  # 16 boots on 8 cores: two each.
    assert second.ready_at - 100.0 <= sum(boots_s) / 8 + boots_s[-1]
    assert first.ready_at > SCENARIO.fetch_s
    assert host.images == {"i"}


def test_draws_depend_on_the_seed_alone():
    assert SCENARIO.draw_images() == SCENARIO.draw_images()
    one, two = (SimulatedHost("h0", SCENARIO).acquire(wanted("a"), "i", 0.0) for _ in range(2))
    assert one.ready_at == pytest.approx(two.ready_at)
