"""Runs whose weights are published, or trained, by ranks of their own, one of which is killed."""

import json

import pytest

from .launched import Launched, penstock

RUN_S = 300.0


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.timeout(400)
def test_two_ranks_publish_what_one_trainer_holds_and_replay_gives_it_again(tmp_path):
    run = Launched(tmp_path, "relay.num_publisher_ranks=2", "trainer.optimizer.weight_decay=0.1")
    try:
        run.until("step 1: ")
        run.kill("publisher:1")
        assert run.wait(RUN_S) == 0, run.output
    finally:
        run.end()
    run.check_sound(steps=4)
    assert "process publisher-1 ended" in run.output
    assert not (run.folder / "handover").exists()
    assert run.summary["sync"]["versions"] == 5
    assert run.summary["sync"]["empty_deltas"] == 0
    assert run.summary["sync"]["digest_mismatches"] == 0
    told = penstock(tmp_path, "log", "cat", "r1", "--type", "WeightsPublished").stdout
    published = [json.loads(line) for line in told.splitlines()]
    assert [manifest["policy_version"] for manifest in published] == [0, 1, 2, 3, 4]
    assert all(len(manifest["shards"]) >= 2 for manifest in published)
    state = json.loads(penstock(tmp_path, "status", "r1", "--json").stdout)
    for region in state["regions"].values():
        assert set(region["replicas"].values()) == {4}


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
