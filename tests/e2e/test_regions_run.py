"""A whole run whose two regions are behind links, and what is left of it when it is killed."""

import json
import sys
from pathlib import Path

import pytest

from .launched import Launched, gone, penstock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAB = (sys.executable, "-m", "tests.lab", "--runs-dir")
START_S = 120.0
"""Until the actors are there: links, leaf nodes, tasks and tokenizer come first."""
RUN_S = 300.0

SETTINGS = (
    'store.kind="jetstream"',
    'regions=[{name="west",serves=["train"]},{name="east",serves=["eval","live"]}]',
    'processes.generator-west=["relay:west","generator:west"]',
    'processes.generator-east=["relay:east","generator:east"]',
    'processes.control=["pacer","evaluator","feedback"]',
)
LINKS = """
west = { bandwidth_mbit_s = 50, rtt_ms = 40, loss = 0.001 }
east = { bandwidth_mbit_s = 20, rtt_ms = 120 }
"""


def launch(runs: Path, *, resume: bool = False) -> Launched:
    (runs / "links.toml").write_text(LINKS)
    links = () if resume else ("--links", str(runs / "links.toml"))
    settings = () if resume else SETTINGS
    return Launched(runs, *settings, resume=resume, program=(*LAB, str(runs), "regions", *links))


def namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def test_a_run_over_links_is_sound_and_shows_their_lag(tmp_path: Path) -> None:
    run = launch(tmp_path)
    try:
        run.until("region east: 20 Mbit/s, 120 ms round trip")
        west = run.pid_of("generator:west", wait_s=START_S)
        east = run.pid_of("generator:east", wait_s=START_S)
        if "(network namespace)" in run.output:
            places = {namespace(pid) for pid in (west, east, run.process.pid)}
            assert len(places) == 3
        assert run.wait(RUN_S) == 0, run.output
        run.check_sound(steps=4)
        state = json.loads(penstock(tmp_path, "status", "r1", "--json").stdout)
        for region in state["regions"].values():
            assert region["num_bytes"] > 0
            assert max(delta["lag_s"] for delta in region["deltas"]) > 0
            assert region["num_digest_mismatches"] == 0
    finally:
        run.end()
    assert gone({west, east})


def test_a_killed_run_over_links_leaves_nothing_and_goes_on(tmp_path: Path) -> None:
    run = launch(tmp_path)
    try:
        run.until("region east")
        far = run.pid_of("generator:east", wait_s=START_S)
        hub = run.pid_of("trainer", wait_s=START_S)
    finally:
        run.end()
    assert gone({far, hub})
    again = launch(tmp_path, resume=True)
    try:
        assert again.wait(RUN_S) == 0, again.output
        again.check_sound(steps=4)
    finally:
        again.end()
