"""What a link does to packets, and what a configuration may say of it."""

from pathlib import Path

import pytest
import tomli_w
from tests.lab.regions.links import LinkError, Subnet
from tests.lab.regions.settings import LinkSection, check_links, check_processes, read_links
from tests.lab.regions.shaping import InFlight, Shaper

from penstock.infra.cli import main
from penstock.infra.config.file import load_config, parse_config, read_toml
from penstock.infra.config.regions import RegionPlace, region_of
from penstock.infra.run.command import parse_new
from penstock.infra.run.runs import RunDir, RunState
from penstock.messages.errors import ConfigError

FOUR = Path("tests/lab/regions/four-regions.toml")
PACKET_BYTES = 1250


def shaper(**fields) -> Shaper:
    defaults = {"bandwidth_mbit_s": 10.0, "rtt_ms": 100.0}
    return Shaper(LinkSection(**(defaults | fields)), seed=1)


def test_a_packet_takes_its_own_length_and_half_a_round_trip():
    assert shaper().arrival_s(5.0, PACKET_BYTES) == pytest.approx(5.0 + 0.001 + 0.05)


def test_packets_queue_behind_each_other_up_to_a_bound():
    link = shaper()
    arrivals = [link.arrival_s(0.0, PACKET_BYTES) for _ in range(200)]
    carried = [arrival for arrival in arrivals if arrival is not None]
    assert carried == pytest.approx([0.05 + 0.001 * (i + 1) for i in range(len(carried))])
    assert 100 <= len(carried) <= 102
    assert link.arrival_s(1.0, PACKET_BYTES) == pytest.approx(1.051)


def test_about_the_share_of_packets_is_lost_that_was_asked_for():
    link = shaper(loss=0.1)
    lost = [link.arrival_s(float(i), PACKET_BYTES) is None for i in range(5000)]
    assert 0.08 < sum(lost) / len(lost) < 0.12
    again = shaper(loss=0.1)
    assert [again.arrival_s(float(i), PACKET_BYTES) is None for i in range(5000)] == lost


def test_a_stream_loses_nothing_but_time():
    link, perfect = shaper(loss=0.3), shaper()
    arrivals = [link.arrival_in_stream_s(float(i), PACKET_BYTES) for i in range(100)]
    assert arrivals == sorted(arrivals)
    late = [arrival - perfect.arrival_s(float(i), 1250) for i, arrival in enumerate(arrivals)]
    assert min(late) == pytest.approx(0.0)
    assert max(late) >= 0.1


def test_packets_on_their_way_come_out_when_they_arrive():
    flying = InFlight()
    assert flying.wait_s(0.0) is None
    flying.add(1.0, b"a")
    flying.add(2.0, b"b")
    assert (flying.pop_arrived(0.5), flying.wait_s(0.5)) == (None, 0.5)
    assert (flying.pop_arrived(1.5), flying.pop_arrived(1.5)) == (b"a", None)


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("bandwidth_mbit_s = 0\nrtt_ms = 1", r"links: far: .*> 0.*`\$\.bandwidth_mbit_s`"),
        ("bandwidth_mbit_s = 10\nrtt_ms = -1", r"far: .*>= 0.*rtt_ms"),
        ("bandwidth_mbit_s = 10\nrtt_ms = 1\nloss = 2", r"far: .*<= 0\.5.*loss"),
        ("bandwidth_mbit_s = 10", "missing required field `rtt_ms`"),
        ("bandwidth_mbit_s = 10\nrtt_ms = 1\njitter = 1", "jitter"),
        ("bandwidth_mbit_s =", "links: not TOML"),
    ],
)
def test_a_wrong_link_is_named(link, expected, tmp_path):
    path = tmp_path / "links"
    path.write_text(f"[far]\n{link}\n")
    with pytest.raises(ConfigError, match=expected):
        read_links(path)


def test_the_four_regions_are_valid_and_each_has_its_own_process():
    config, links = load_config(FOUR), read_links(FOUR.with_suffix(".links.toml"))
    assert list(links) == [region.name for region in config.regions]
    check_links(config, links)


def test_a_process_on_both_sides_of_a_link_is_refused():
    with pytest.raises(ConfigError, match=r"processes\.control: relay:eu is behind the link"):
        check_processes({"control": ["pacer", "relay:eu"]}, ["eu"])
    check_processes({"eu": ["relay:eu", "generator:eu"], "control": ["pacer", "relay:us"]}, ["eu"])
    links = {"near": LinkSection(bandwidth_mbit_s=10.0, rtt_ms=1.0)}
    config = parse_config(read_toml(FOUR) | {"bus": {"servers": ["nats://elsewhere:4222"]}}, "test")
    with pytest.raises(ConfigError, match=r"expected no bus\.servers"):
        check_links(config, links)
    config = parse_config(read_toml(FOUR) | {"store": {"kind": "directory"}}, "test")
    with pytest.raises(ConfigError, match=r"only store\.kind = \"jetstream\" crosses"):
        check_links(config, links)
    with pytest.raises(ConfigError, match=r"expected regions of the configuration, got \['far'\]"):
        check_links(load_config(FOUR), {"far": links["near"]})


def test_a_former_runs_link_is_read_over_and_refused_where_it_would_matter(tmp_path, capsys):
    data = read_toml(FOUR)
    data["regions"][1]["link"] = {"bandwidth_mbit_s": 10.0, "rtt_ms": 1.0}
    with pytest.raises(ConfigError, match=r"old: regions\.europe\.link: .* tests\.lab regions"):
        parse_new(data, "old")
    run = RunDir(tmp_path / "r1")
    run.path.mkdir()
    run.config.write_text(tomli_w.dumps(data))
    assert load_config(run.config) == load_config(FOUR)
    assert "config.toml: regions.europe.link: ignored" in capsys.readouterr().err
    assert main(["--runs-dir", str(tmp_path), "run", "--resume", "r1"]) == 2
    assert "regions.europe.link: no longer a setting" in capsys.readouterr().err


def test_a_process_belongs_to_the_region_of_all_its_roles():
    assert region_of(["relay:eu", "generator:eu"]) == "eu"
    assert region_of(["relay:eu", "relay:us"]) == region_of(["pacer"]) == ""
    far = RegionPlace(url="nats://far", entrance=["nsenter", "--net=/proc/7/ns/net", "--"])
    state = RunState(run_id="r", url="nats://hub", pid=1, started_at=0.0, regions={"eu": far})
    assert state.place(["relay:eu"]).entrance == ["nsenter", "--net=/proc/7/ns/net", "--"]
    assert state.place(["relay:us"]) == state.place(["pacer"]) == RegionPlace(url="nats://hub")
    assert state.place(["pacer"]).entrance == []


def test_a_run_takes_addresses_that_nobody_has():
    subnet = Subnet(["10.213.7.1", "192.168.0.1"], first=7)
    assert (subnet.hub, subnet.region(0), subnet.device(3)) == ("10.213.8.1", "10.213.8.2", "ps8-3")
    with pytest.raises(LinkError, match="no free network"):
        Subnet([f"10.213.{i}.1" for i in range(256)], first=0)
