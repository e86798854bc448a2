"""A burst of machines through the real scheduler, on virtual time and over a real server."""

import msgspec
import pytest
from tests.lab.simulate.sandboxes.nats import place_over_nats
from tests.lab.simulate.sandboxes.settings import BurstScenario
from tests.lab.simulate.sandboxes.virtual import simulate_burst

from penstock.messages.errors import ConfigError

SMALL = BurstScenario(num_machines=480, num_hosts=6, num_images=20, num_failures=1, num_at_once=16)


def test_every_machine_of_a_burst_comes_up_once_and_the_load_is_even():
    figures = simulate_burst(SMALL)
    assert figures["machines_live"] == 480
    assert figures["retries"] == 0
    assert figures["host_load_max_over_mean"] < 1.35
    assert figures["ready_s_p99"] < 1.0
    again = simulate_burst(SMALL)
    assert {**figures, "cpu_s": 0} == {**again, "cpu_s": 0}


def test_groups_by_image_move_a_fraction_of_what_machine_by_machine_moves():
    scenario = BurstScenario(num_machines=320, num_hosts=20, num_slots=80, num_images=60)
    grouped, single = (simulate_burst(scenario, policy) for policy in ("affinity", "round_robin"))
    assert grouped["fetched_tb"] < 0.25 * single["fetched_tb"]
    assert (grouped["placements"], single["placements"]) == (20, 320)


def test_where_there_is_no_room_a_group_waits():
    tight = msgspec.structs.replace(
        SMALL, num_machines=320, num_hosts=1, num_slots=320, num_failures=0
    )
    assert simulate_burst(tight)["machines_live"] == 320


def test_a_burst_that_nothing_could_hold_is_refused():
    with pytest.raises(ConfigError, match="--machines: expected 640 or fewer"):
        BurstScenario(num_machines=960, num_hosts=3, num_failures=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_hundred_thousand_machines():
    figures = simulate_burst(BurstScenario())
    assert figures["machines_live"] == 100_000
    assert figures["ready_s_p99"] < 1.0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_burst_over_a_real_server_loses_nothing_with_a_host():
    figures = await place_over_nats(SMALL, "affinity")
    assert figures["machines"] == 480
    assert (figures["hosts_died"], figures["groups_lost"], figures["groups_twice"]) == (1, 0, 0)
    assert figures["machines_created"] >= 480 + figures["machines_died"]
