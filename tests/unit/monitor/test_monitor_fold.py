"""The fold: a small run's events become its state."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.monitor.actor import exposition
from penstock.actors.monitor.curves import append_thinned
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import MonitorState, decode_state, encode_state
from penstock.messages.control import RunOpened
from penstock.messages.errors import CodecError
from penstock.messages.reward import Outcome
from penstock.messages.rollout import Trunk
from penstock.messages.telemetry import Wait
from penstock.messages.training import LedgerRow

from .story import AT, by_stream, finished, report, rollout, step, story, version


def folded(events, now: float = AT + 1.0) -> MonitorState:
    fold = RunFold()
    for event in events:
        fold.apply(event, AT)
    return fold.state(now)


def test_the_curves_and_counts_of_a_run():
    state = folded(story())
    assert (state.run.run_id, state.run.phase, state.run.step) == ("r1", "rl", 2)
    assert [(p.num_tokens, p.loss) for p in state.midtrain.points] == [(50, 3.0), (100, 2.0)]
    assert [s.metrics for s in state.steps] == [{"reward_mean": 0.5, "mismatch_k1": 0.001}] * 2
    assert [(e.policy_version, e.num_solved) for e in state.evals] == [(0, 1), (2, 3)]
    assert (state.staleness.tokens, state.staleness.budget_max) == ({0: 30, 1: 30}, 2)
    assert state.rollouts.outcomes == {"solved": 1, "failed": 2}
    assert (state.rollouts.num_turns, state.rollouts.num_sampled_tokens) == (6, 45)
    assert (state.sandbox.num_vms, state.sandbox.boot_ms_p50) == (6, 90.0)


def test_turns_that_branches_share_with_their_trunk_count_once():
    trunk, branch = (rollout(name, 0, Outcome.SOLVED)[2] for name in ("r0", "r1"))
    branch = msgspec.structs.replace(branch, trunk=Trunk(rollout_id="r0", num_turns=1))
    rollouts = folded([trunk, branch]).rollouts
    assert rollouts.num_finished == 2
    assert (rollouts.num_turns, rollouts.num_sampled_tokens) == (3, 20)


def test_segments_and_summaries_are_counted_with_the_tokens_of_these():
    rollout_of_two = rollout("r0", 0, Outcome.SOLVED)[2]
    summary, after = rollout_of_two.turns
    summary = msgspec.structs.replace(summary, is_summary=True)
    after = msgspec.structs.replace(after, starts_segment=True)
    chain = msgspec.structs.replace(rollout_of_two, turns=[summary, after])
    view = folded([chain, rollout("r1", 0, Outcome.SOLVED)[2]]).rollouts
    assert (view.num_train, view.num_train_segments, view.num_summaries) == (2, 3, 1)
    assert (view.num_summary_tokens, view.num_sampled_tokens) == (10, 30)


def test_the_ledger_balances_and_shows_what_is_in_flight():
    ledger = folded(story()).ledger
    assert ledger.balanced
    assert ledger.rows == {
        0: LedgerRow(generated=38, trained=23, stale=15),
        1: LedgerRow(generated=15, in_flight=15),
    }


def test_regions_tell_size_ratio_pause_and_wrong_digests():
    west = folded(story()).regions["west"]
    assert west.replicas == {"west-0": 2, "west-1": 2}
    assert [(d.kind, d.num_bytes, d.ratio, d.pause_ms) for d in west.deltas] == [
        ("full", 1000, 1.0, 4.0),
        ("delta", 100, 10.0, 4.0),
        ("delta", 50, 20.0, 4.0),
    ]
    assert west.deltas[1].changed_fraction == 0.25
    assert (west.num_full_after_v0, west.num_digest_mismatches) == (0, 2)


def test_live_requests_are_counted_to_their_training():
    live = folded(story()).live
    assert (live.num_requests, live.num_consented, live.num_feedback) == (1, 1, 2)
    assert (live.num_retracted, live.num_joined, live.num_trained) == (1, 1, 1)
    assert live.reward_mean == 0.75


def test_actors_show_starts_errors_load_and_waits():
    wait = Wait(target="sandbox_host", reason="a machine", since=AT - 2.0, deadline_s=30.0)
    reports = [
        report("trainer", "trainer", AT, 4.0, wait),
        report("host-0", "sandbox_host", AT - 1.0, 1.0),
        report("host-0", "sandbox_host", AT, 1.75),
    ]
    state = folded([*story(), *reports])
    trainer, host = state.actors["trainer"], state.actors["host-0"]
    assert (trainer.pid, trainer.num_starts, trainer.last_error) == (12, 2, "KeyError: 'x'")
    assert trainer.busy_fraction == 0.4
    assert host.busy_fraction_recent == 0.75
    assert state.sandbox.gauges == {"vms_warm": 3.0}
    assert state.stall.words == (
        "trainer has waited 3.0 s for sandbox_host (a machine); host-0 is working (75% busy)"
    )
    assert "digest" in "".join(line.text for line in state.log if line.level == "error")


def test_a_run_that_is_over_is_not_stalled():
    events = [*story(), report("trainer", "trainer", AT, 4.0)]
    assert folded(events, now=AT + 500.0).stall.is_stalled
    state = folded([*events, finished()], now=AT + 500.0)
    assert (state.run.phase, state.run.finish_reason) == ("finished", "step limit")
    assert not state.stall.is_stalled


@given(st.data())
def test_streams_may_interleave_in_any_way(data):
    streams = by_stream(story())
    order = [stream for stream, events in streams.items() for _ in events]
    shuffled = [streams[s].pop(0) for s in data.draw(st.permutations(order))]
    expected, state = folded(story()), folded(shuffled)
    expected.log = state.log = []
    assert state == expected


def test_the_state_survives_json_and_is_what_prometheus_sees():
    state = folded(story())
    assert decode_state(encode_state(state)) == state
    with pytest.raises(CodecError):
        decode_state(b'{"run": 3}')
    lines = exposition(state).decode().splitlines()
    for line in (
        "penstock_step 2.0",
        "penstock_heldout_pass_rate 0.75",
        'penstock_step_metric{name="mismatch_k1"} 0.001',
        'penstock_trained_tokens_total{staleness="1"} 30.0',
        'penstock_ledger_tokens{fate="in_flight"} 15.0',
        'penstock_served_version{region="west",replica="west-1"} 2.0',
        'penstock_delta_bytes{region="west"} 50.0',
        'penstock_rollouts_total{outcome="failed"} 2.0',
    ):
        assert line in lines


def test_a_long_curve_keeps_its_ends_and_stays_bounded():
    points: list[int] = []
    for i in range(10_000):
        append_thinned(points, i, num_max=100)
        assert len(points) <= 100
    assert (points[0], points[-1]) == (0, 9_999)
    assert points == sorted(points)


def test_the_state_of_a_long_run_fits_one_message():
    fold = RunFold()
    metrics = {f"name_of_metric_{i:02}": 0.00123456789012345 for i in range(60)}
    for number in range(1, 1200):
        manifest, taken = step(number, live=[])
        taken = msgspec.structs.replace(taken, metrics=metrics)
        for event in (manifest, taken, *version(number, 100_000)):
            fold.apply(event, AT)
    for i in range(64):
        fold.apply(report(f"actor-{i}", "rollout_worker", AT, 1.0), AT)
    assert len(encode_state(fold.state(AT))) < 448 << 10


def test_a_service_does_not_miss_the_actors_of_its_run():
    fold = RunFold()
    for name in ("trainer", "gateway"):
        fold.apply(report(name, name, AT, 0.0), AT)
    fold.apply(RunOpened(incarnation="i", is_service=True), AT + 100.0)
    fold.apply(report("gateway", "gateway", AT + 101.0, 0.0), AT + 101.0)
    found = fold.state(AT + 102.0)
    assert found.stall.words == "nothing is waiting"
    assert [name for name, view in found.actors.items() if not view.has_ended] == ["gateway"]
    assert "no reports come from gateway" in fold.state(AT + 200.0).stall.words
    fold.apply(RunOpened(incarnation="j"), AT + 201.0)
    assert "trainer" in fold.state(AT + 202.0).stall.words
