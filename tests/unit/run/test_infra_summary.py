"""Figures that restarts must not falsify."""

from pathlib import Path

from penstock.actors.monitor.fold import RunFold
from penstock.infra.config.file import load_config
from penstock.infra.run.closing import closing_table
from penstock.infra.run.summary import run_summary
from penstock.messages.control import RunFinished
from penstock.messages.telemetry import ActorReported
from penstock.messages.training import MidtrainCompleted, StepCompleted
from penstock.messages.weights import (
    ShardRef,
    SnapshotKind,
    WeightsApplied,
    WeightsPublished,
    WeightsRelayed,
)

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "config.toml"


def folded(*events):
    fold = RunFold()
    for at, event in events:
        fold.apply(event, at)
    state = fold.state(fold.last_at)
    return run_summary(state, load_config(QUICKSTART), {}, started_at=0.0, ended_at=100.0)


def report(actor, **gauges):
    return ActorReported(
        actor=actor, role="", at=0.0, busy_s=0.0, uptime_s=1.0, num_handled=0, num_queued=0,
        gauges=gauges, waits=[],
    )  # fmt: skip


def test_gauges_count_over_restarts_and_mended_digests_are_told():
    figures = folded(
        (10.0, MidtrainCompleted(num_tokens=1, loss_first=1.0, loss_last=1.0, heldout_loss=1.0,
                                 heldout_perplexity=1.0, weights_digest="", wall_s=5.0)),
        (11.0, report("generator-west", engine_busy_s=3.0)),
        (12.0, report("generator-west", engine_busy_s=4.0)),
        (13.0, report("generator-west", engine_busy_s=1.0)),
        (14.0, report("generator-east", engine_busy_s=50.0)),
        (15.0, report("receiver-west", digest_mismatches=2.0)),
        (16.0, report("receiver-east", digest_mismatches=1.0)),
        (17.0, report("receiver-west", digest_mismatches=0.0)),
        (20.0, RunFinished(reason="steps_max", step=0)),
    )  # fmt: skip
    assert figures["utilization"]["generator_busy"] == 0.5
    assert figures["sync"]["digest_mismatches"] == 3


def test_the_swap_pause_is_told_with_its_share_of_a_step():
    def applied(version, pause_ms):
        return WeightsApplied(
            region="west", replica="west", policy_version=version, root_digest="",
            digest_matches=True, from_version=version - 1, num_bytes=1, stage_ms=1.0,
            pause_ms=pause_ms,
        )  # fmt: skip

    def step(number, train_s, wait_s):
        return StepCompleted(
            step=number, policy_version=number, weights_digest="", optimizer_digest="",
            metrics={}, staleness_tokens={0: 1}, train_s=train_s, wait_s=wait_s,
        )  # fmt: skip

    sync = folded(
        (1.0, applied(0, 900.0)),
        (2.0, step(1, 1.0, 1.0)),
        (3.0, applied(1, 1.0)),
        (4.0, step(2, 3.0, 1.0)),
        (5.0, applied(2, 4.0)),
        (6.0, step(3, 1.5, 0.5)),
        (7.0, applied(3, 2.0)),
    )["sync"]
    assert (sync["pause_ms_p50"], sync["pause_ms_max"]) == (2.0, 4.0)
    assert sync["pause_share"] == 0.001
    assert folded((1.0, applied(1, 1.0)))["sync"]["pause_share"] is None


def published(version, num_bytes, num_changed):
    shard = ShardRef(shard_id=0, object_key="o", num_bytes=num_bytes, blake3="b", codec="gap")
    return WeightsPublished(
        policy_version=version, base_version=version - 1, optimizer_step=version, fencing_token=1,
        kind=SnapshotKind.DELTA if version else SnapshotKind.FULL, representation="bf16",
        base_root_digest="", target_root_digest="d", num_params=500, num_changed=num_changed,
        full_bytes=1000, shards=[shard],
    )  # fmt: skip


def test_a_delta_in_which_nothing_changed_has_no_ratio_and_is_counted():
    sync = folded(
        (1.0, published(0, 1000, 500)),
        (2.0, published(1, 10, 0)),
        (3.0, published(2, 100, 50)),
        (4.0, published(3, 10, 0)),
    )["sync"]
    assert (sync["versions"], sync["ratio_median"], sync["empty_deltas"]) == (4, 10.0, 2)


def test_lag_and_bytes_are_told_by_region():
    def relayed(region, version):
        return WeightsRelayed(region=region, policy_version=version, num_bytes=100, fetch_ms=1.0)

    def applied(region, version):
        return WeightsApplied(
            region=region, replica=region, policy_version=version, root_digest="d",
            digest_matches=True, from_version=version - 1, num_bytes=1, stage_ms=1.0,
            pause_ms=2.0 * version,
        )  # fmt: skip

    events = []
    for version in range(4):
        at = 10.0 * version
        events += [
            (at, published(version, 100, 1)),
            *((at + 0.5, relayed(region, version)) for region in ("near", "far")),
            (at + 1.0, applied("near", version)),
            (at + 2.0 + version, applied("far", version)),
        ]
    regions = folded(*events)["sync"]["by_region"]
    assert regions == {
        "near": {"lag_s_p50": 1.0, "lag_s_p95": 1.0, "pause_ms_p50": 4.0, "num_bytes": 400},
        "far": {"lag_s_p50": 4.0, "lag_s_p95": 5.0, "pause_ms_p50": 4.0, "num_bytes": 400},
    }


def test_the_closing_table_has_a_line_for_each_region():
    regions = {"near": {"lag_s_p50": 1.25}, "far": {"lag_s_p50": None}}
    lines = closing_table({"wall_s": 2.0, "seed": 7, "sync": {"by_region": regions, "regions": 2}})
    assert lines == [
        "wall       2 s, seed 7",
        "sync       regions 2",
        "sync near  lag_s_p50 1.25",
        "sync far   lag_s_p50 -",
    ]


def test_recorded_routes_are_counted_by_step_and_by_token():
    steps = [
        StepCompleted(
            step=number, policy_version=number, weights_digest="", optimizer_digest="",
            metrics={"route_bytes": size, "tokens_read": tokens}, staleness_tokens={0: 1},
            train_s=1.0, wait_s=0.0,
        )
        for number, size, tokens in ((1, 300.0, 100.0), (2, 900.0, 300.0), (3, 330.0, 100.0))
    ]  # fmt: skip
    rl = folded(*((float(step.step), step) for step in steps))["rl"]
    assert rl["route_bytes_per_step"] == 330.0
    assert rl["route_bytes_per_token"] == 1530.0 / 500.0


def test_what_steps_measure_is_told_as_means():
    def step(number, **metrics):
        return StepCompleted(
            step=number, policy_version=number, weights_digest="", optimizer_digest="",
            metrics=metrics,
        )  # fmt: skip

    figures = folded(
        (10.0, step(1, entropy=2.0, mismatch_engine_k3=1e-9)),
        (11.0, step(2, entropy=1.0, mismatch_engine_k3=3e-9, loss=0.5)),
    )
    assert figures["objective"] == {"entropy": 1.5, "mismatch_engine_k3": 2e-9}


def test_the_closing_table_has_a_line_for_each_group_of_figures():
    figures = {
        "wall_s": 10.0,
        "seed": 0,
        "tasks": {"num": 3, "train_pass_rate": {"ladder": 0.5}},
        "sync": {"by_region": {"east": {"lag_s": 1.0}, "west": {"lag_s": 2.0}}},
    }
    assert [line.split() for line in closing_table(figures)] == [
        ["wall", "10", "s,", "seed", "0"],
        ["tasks", "num", "3"],
        ["tasks", "train_pass_rate", "ladder", "0.5"],
        ["sync", "east", "lag_s", "1"],
        ["sync", "west", "lag_s", "2"],
    ]
