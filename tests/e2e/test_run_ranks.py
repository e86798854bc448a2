"""A run whose weights are trained and published by ranks, one of which is killed."""

import json

import pytest

from .launched import Launched, penstock

RUN_S = 300.0


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.timeout(600)
def test_a_killed_rank_changes_no_bit_of_a_run(tmp_path):
    run = Launched(tmp_path, 'trainer.engine="ranks"', "run.wall_s_max=380")
    try:
        run.until("step 1: ", wait_s=200.0)
        run.kill("rank:1")
        assert run.wait(2 * RUN_S) == 0, run.output
    finally:
        run.end()
    run.check_sound(steps=4)
    assert "process rank-1 ended" in run.output
    replayed = json.loads(penstock(tmp_path, "replay", "r1", "--json").stdout)
    assert (replayed["identical"], replayed["steps_compared"]) == (True, 4), "by one process"
    started = penstock(tmp_path, "log", "cat", "r1", "--type", "RunStarted").stdout
    arithmetic = json.loads(started)["arithmetic"]
    assert (arithmetic["engine"], arithmetic["num_ranks"]) == ("ranks", 2)
    saved = penstock(tmp_path, "log", "cat", "r1", "--type", "WeightsPublished").stdout
    published = [json.loads(line) for line in saved.splitlines()]
    assert [manifest["policy_version"] for manifest in published] == [0, 1, 2, 3, 4]
    assert all(len(manifest["shards"]) >= 2 for manifest in published), "each rank its own"
