"""The simulation at scale, small: what it counts, and that it is one and the same each time."""

import asyncio
import json

import msgspec
import pytest
from tests.lab.__main__ import main
from tests.lab.regions.shaping import Bandwidth
from tests.lab.simulate.weights.settings import Mishap, RegionSettings, Scenario
from tests.lab.simulate.weights.simulation import simulate
from tests.lab.simulate.weights.sized_store import Site, SizedBytes, SizedStore
from tests.lab.simulate.weights.sizes import MEASURED_MERGED_FRACTION, Sizes
from tests.lab.simulate.weights.transfers import carry
from tests.support.virtual_clock import run_virtual

from penstock.messages.errors import CorruptDataError, NotFoundError

NEAR = RegionSettings(name="near", link_gbit_s=100.0, round_trip_s=0.002)
FAR = RegionSettings(name="far", link_gbit_s=25.0, round_trip_s=0.2)
SMALL = Scenario(
    num_steps=10, num_replicas=8, num_ranks=8, ranks_per_verifier=1, regions=(NEAR, FAR)
)


def with_mishap(**fields) -> Scenario:
    return msgspec.structs.replace(SMALL, mishap=Mishap(**fields))


def test_every_replica_gets_every_version_and_the_trainer_uploads_each_once():
    found = simulate(SMALL)
    assert (found["versions"], found["replicas"]) == (11, 8)
    assert found["full_uploads_after_v0"] == 0
    assert found["trainer_egress_gb_step"] < found["full_snapshot_gb"] / 50
    assert 0 < found["manifest_bytes_max"] < 1 << 20
    near, far = found["regions"]["near"], found["regions"]["far"]
    assert near["fetched_of_published"] == far["fetched_of_published"] == pytest.approx(1, abs=0.01)
    assert near["time_to_version_s"]["p50"] < far["time_to_version_s"]["p50"]


def test_a_single_rank_takes_its_time_for_a_whole_model():
    """A terabyte at 3.6 GB/s of coding and 25 Gbit/s: longer than any version after it."""
    found = simulate(msgspec.structs.replace(SMALL, num_steps=1, num_ranks=1))
    assert found["first_publish_s"] > 600.0


def test_a_seed_decides_every_figure():
    first, other = simulate(SMALL), simulate(msgspec.structs.replace(SMALL, seed=1))
    assert simulate(SMALL) == first
    assert other["time_to_version_s"] != first["time_to_version_s"]


def test_a_lost_relay_leaves_its_region_behind_and_no_other():
    found = simulate(with_mishap(region="far", relay_lost_at_step=4, relay_lost_s=180.0))
    assert found["regions"]["far"]["lag_versions_max"] >= 3
    near, undisturbed = found["regions"]["near"], simulate(SMALL)["regions"]["near"]
    assert near["lag_versions_max"] == undisturbed["lag_versions_max"]
    times_s, expected_s = near["time_to_version_s"], undisturbed["time_to_version_s"]
    assert times_s == pytest.approx(expected_s, abs=FAR.round_trip_s)
    assert found["full_uploads_after_v0"] == 0


def test_a_wire_that_carries_less_than_a_delta_a_step_falls_behind():
    slow = simulate(with_mishap(region="far", link_factor=0.04))["regions"]["far"]
    assert slow["lag_versions_max"] > simulate(SMALL)["regions"]["far"]["lag_versions_max"]


def test_late_joiners_come_in_without_the_trainer():
    found = simulate(with_mishap(region="near", join_at_step=9, num_joiners=3))
    assert found["replicas"] == 11
    assert set(found["join_s"]) == {"p50", "p95", "max"}
    plain = simulate(SMALL)
    assert found["trainer_egress_gb_step"] == plain["trainer_egress_gb_step"]
    assert found["regions"]["near"]["fetched_of_published"] == pytest.approx(1, abs=0.01)


async def _two_on_one_wire() -> list[float]:
    wire, now_s = Bandwidth(100.0), asyncio.get_running_loop().time
    ended: list[float] = []

    async def one(num_bytes: int) -> None:
        await carry([wire], num_bytes, latency_s=1.0)
        ended.append(now_s())

    await asyncio.gather(one(200), one(300))
    return ended


def test_a_wire_serves_in_order_and_latency_comes_on_top():
    assert run_virtual(_two_on_one_wire()) == [3.0, 6.0]


async def test_a_sized_object_is_its_size_and_is_checked_by_its_content():
    store = SizedStore(Site())
    await store.put("a/b", SizedBytes(b"x", 10**12))
    assert len(await store.get("a/b")) == 10**12
    assert await store.keys("a/") == ["a/b"]
    with pytest.raises(CorruptDataError, match="a/b"):
        await store.put("a/b", SizedBytes(b"y", 10**12))
    with pytest.raises(NotFoundError, match="a/c"):
        await store.get("a/c")


def test_sizes_are_those_measured():
    sizes = Sizes(10**12, 64, "3e-6", seed=3)
    drawn = [sum(sizes.delta(version)) for version in range(2, 200)]
    assert 10**12 / (sum(drawn) / len(drawn)) == pytest.approx(79.7, rel=0.03)
    assert sum(sizes.merged(drawn[:8])) == pytest.approx(
        sum(drawn[:8]) * MEASURED_MERGED_FRACTION, rel=1e-6
    )


def test_the_command_ends_with_one_json_object(capsys):
    sizes = ["--steps", "3", "--replicas", "4", "--ranks", "2"]
    assert main(["simulate-weights", "--json", *sizes]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["scenario"]["num_steps"] == 3
    assert set(found["scenarios"]) >= {"as planned", "relay lost for 5 steps", "late joiners"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("--steps", "0"), "num_steps: expected 1 or more, got 0"),
        (("--ranks", "-1"), "num_ranks: expected 1 or more, got -1"),
        (("--replicas", "0"), "num_replicas: expected 1 or more, got 0"),
        (("--replicas", "6"), "num_replicas: expected a multiple of 4 regions, got 6"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_words(given, expected, capsys):
    assert main(["simulate-weights", *given]) == 2
    assert expected in capsys.readouterr().err
