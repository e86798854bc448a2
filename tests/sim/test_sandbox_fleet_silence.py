"""A host that falls silent in a burst costs what it held: no other lease expires meanwhile."""

from tests.lab.simulate.sandboxes.settings import BurstScenario
from tests.lab.simulate.sandboxes.virtual import place_in_memory
from tests.support.virtual_clock import run_virtual


def test_a_silent_host_holds_up_no_other_hosts_leases():
    scenario = BurstScenario(
        num_machines=1600, num_hosts=40, num_images=20, num_failures=2, num_at_once=4
    )
    figures = run_virtual(place_in_memory(scenario, "affinity"))
    assert figures["machines"] == 1600
    assert figures["hosts_died"] == 2
    assert 0 < figures["groups_requested_again"] <= figures["machines_died"] / scenario.group_size
    assert (figures["groups_lost"], figures["groups_twice"]) == (0, 0)
    assert figures["machines_reaped"] == 0
    assert figures["machines_created"] == 1600 + figures["machines_died"]
