"""A burst of machines through the real scheduler, on virtual time and over a real server."""

import msgspec
import pytest

from penstock.infra.simulate.fleet.nats import place_over_nats
from penstock.infra.simulate.fleet.settings import FleetScenario
from penstock.infra.simulate.fleet.simulation import simulate_fleet

SMALL = FleetScenario(num_machines=960, num_hosts=6, num_images=20)


def test_every_machine_of_a_burst_comes_up_once_and_the_load_is_even():
    figures = simulate_fleet(SMALL)
    assert figures["machines_live"] == 960
    assert figures["retries"] == 0
    assert figures["host_load_max_over_mean"] < 1.35
    assert figures["ready_s_p99"] < 1.0
    again = simulate_fleet(SMALL)
    assert {**figures, "cpu_s": 0} == {**again, "cpu_s": 0}


def test_where_there_is_no_room_a_group_waits():
    tight = msgspec.structs.replace(SMALL, num_machines=320, num_hosts=1, num_slots=320)
    assert simulate_fleet(tight)["machines_live"] == 320


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_machines():
    figures = simulate_fleet(FleetScenario())
    assert figures["machines_live"] == 100_000
    assert figures["ready_s_p99"] < 1.0


async def test_groups_are_placed_over_a_real_server():
    figures = await place_over_nats(SMALL)
    assert figures["machines_placed"] == 960
