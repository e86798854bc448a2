"""A run whose weights are published by ranks of their own, one of which is killed."""

import json

import pytest

from .launched import Launched, penstock

RUN_S = 300.0


@pytest.mark.slow
@pytest.mark.vm
@pytest.mark.timeout(400)
def test_two_ranks_publish_what_one_trainer_holds_and_replay_gives_it_again(tmp_path):
    run = Launched(tmp_path, "weights.num_publisher_ranks=2", "trainer.optimizer.weight_decay=0.1")
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
