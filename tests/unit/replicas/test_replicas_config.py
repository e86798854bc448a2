"""What is said of regions, their replicas and their channels is checked when it is read."""

from pathlib import Path

import pytest

from penstock.infra.config.file import load_config
from penstock.infra.config.regions import region_of, region_of_role, replica_name
from penstock.messages.errors import ConfigError

QUICKSTART = Path("examples/quickstart/config.toml")
EAST = '{ name = "east", serves = ["eval", "live"]%s }'
WEST = '{ name = "west", serves = ["train"]%s }'


def regions(west: str = "", east: str = "", more: str = "") -> str:
    return f"regions=[{WEST % west}, {EAST % east}{more}]"


def test_a_region_has_any_number_of_replicas() -> None:
    load_config(
        QUICKSTART,
        [
            'processes.generator-west=["generator:west", "generator:west/a"]',
            'processes.more=["generator:west/b"]',
        ],
    )
    assert replica_name("generator:eu") == "eu"
    assert replica_name("generator:eu/a") == "eu.a"
    assert region_of_role("generator:eu/a") == region_of_role("relay:eu") == "eu"
    assert region_of(["relay:eu", "generator:eu/a", "generator:eu/b"]) == "eu"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ('processes.more=["generator:west"]', r"processes\.more: .* in processes\.generator-west"),
        ('processes.more=["generator:west/a", "generator:west/a"]', r"processes\.more: .*already"),
        ('processes.more=["generator:north/a"]', "expected one of west, east, got 'north'"),
        ('processes.more=["generator:west/"]', r"expected generator:REGION or"),
        (
            'processes.more=["generator:west/a.b"]',
            r"expected generator:REGION or",
        ),
        ('processes.more=["relay:west/a"]', "expected one of west, east, got 'west/a'"),
        (regions(more=f", {WEST % ''}"), "each name once, got 'west' twice"),
        (regions(east=', channel = "latest"'), r"regions\.east\.channel: .*got 'latest'"),
        (regions(west=', channel = "stable"'), r"regions\.west\.channel: expected newest"),
        (regions(east=', channel = "version:3"'), r"regions\.east\.channel: .*serves eval"),
        ('gateway.channel="version:"', r"channel: expected newest, stable, candidate or version:N"),
        (
            'gateway.channel="stable"',
            r"gateway\.channel: expected .* serves live, newest, got 'stable'",
        ),
        ("generator.lag_s_max=0", r"> 0.*\$\.generator\.lag_s_max"),
    ],
)
def test_settings_that_no_run_can_have_are_refused(override: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        load_config(QUICKSTART, [override])


def test_regions_may_follow_channels() -> None:
    config = load_config(
        QUICKSTART,
        [
            regions(
                east=', channel = "stable"',
                more=', { name = "far", serves = ["live"], channel = "version:3" }',
            ),
            'gateway.channel="stable"',
        ],
    )
    assert config.versions_pinned == {3}
