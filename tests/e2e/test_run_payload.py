"""A whole run whose turns lie in the store: it survives a killed worker and replays from there."""

import json

import pytest

from .launched import Launched, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(600)]
START_S, END_S = 200.0, 360.0


def test_a_run_whose_turns_are_objects_goes_on_after_a_kill_and_replays(tmp_path):
    run = Launched(tmp_path, "bus.inline_bytes=1000")
    run.until("version 0 solves", wait_s=START_S)
    run.kill("actor", "rollout_worker")
    assert run.wait(END_S) == 0, run.output
    assert run.summary["replay"]["identical"] and run.summary["ledger"]["balanced"]
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", "TurnSampled")
    turns = [json.loads(line)["turn"] for line in told.stdout.splitlines()]
    stored = [turn for turn in turns if turn["type"] == "StoredTurn"]
    assert len(stored) > len(turns) / 2
    objects = {path.name for path in (run.folder / "objects" / "claims").iterdir()}
    assert {turn["object_key"].removeprefix("claims/") for turn in stored} <= objects
