"""A whole run whose two regions are behind links, and what is left of it when it is killed."""

import json
from pathlib import Path

import pytest

from .launched import Launched, gone, penstock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

START_S = 120.0
"""Until the actors are there: links, leaf nodes, tasks and tokenizer come first."""
RUN_S = 300.0

SETTINGS = (
    'store.kind="jetstream"',
    'regions=[{name="west",serves=["train"],link={bandwidth_mbit_s=50,rtt_ms=40,loss=0.001}},'
    '{name="east",serves=["eval","live"],link={bandwidth_mbit_s=20,rtt_ms=120}}]',
    'processes.generator-west=["relay:west","generator:west"]',
    'processes.generator-east=["relay:east","generator:east"]',
    'processes.control=["pacer","evaluator","feedback"]',
)


def namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def test_a_run_over_links_is_sound_and_shows_their_lag(tmp_path: Path) -> None:
    run = Launched(tmp_path, *SETTINGS)
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
    run = Launched(tmp_path, *SETTINGS)
    try:
        run.until("region east")
        far = run.pid_of("generator:east", wait_s=START_S)
        hub = run.pid_of("trainer", wait_s=START_S)
    finally:
        run.end()
    assert gone({far, hub})
    again = Launched(tmp_path, resume=True)
    try:
        assert again.wait(RUN_S) == 0, again.output
        again.check_sound(steps=4)
    finally:
        again.end()
