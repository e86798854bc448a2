"""How far each region is behind the trainer."""

from penstock.actors.monitor.actor import exposition
from penstock.actors.monitor.fold import RunFold
from penstock.actors.monitor.state import RegionView
from penstock.messages.generation import ReplicaReported
from penstock.messages.reward import EvalCompleted
from penstock.messages.weights import WeightsApplied

from .story import AT, version


def applied(replica: str, from_version: int, to_version: int, region: str = "west"):
    return WeightsApplied(
        region=region,
        replica=replica,
        policy_version=to_version,
        root_digest="d",
        digest_matches=True,
        from_version=from_version,
        num_bytes=10,
        stage_ms=1.0,
        pause_ms=1.0,
    )


def fold_of(*timed) -> RunFold:
    fold = RunFold()
    for at, event in timed:
        fold.apply(event, at)
    return fold


def published_and_relayed(number: int, at: float):
    published, relayed, *_ = version(number, 100)
    return (at, published), (at + 1.0, relayed)


def west(fold: RunFold, now: float) -> RegionView:
    return fold.state(now).regions["west"]


def test_a_region_is_as_far_behind_as_its_slowest_replica():
    fold = fold_of(
        *(entry for v in range(4) for entry in published_and_relayed(v, AT + 10 * v)),
        (AT + 31, applied("a", 2, 3)),
        (AT + 32, applied("b", 0, 1)),
    )
    region = west(fold, AT + 50)
    assert (region.lag_versions, region.lag_s) == (2, 30.0)
    assert region.num_bytes == 400
    fold.apply(applied("b", 1, 3), AT + 51)
    region = west(fold, AT + 60)
    assert (region.lag_versions, region.lag_s) == (0, 0.0)
    assert [point.lag_s for point in region.deltas] == [0.0, 22.0, 31.0, 21.0]


def test_a_replica_that_joins_late_was_not_behind():
    fold = fold_of(
        *(entry for v in range(3) for entry in published_and_relayed(v, AT + 10 * v)),
        (AT + 500, applied("late", -1, 2)),
    )
    region = west(fold, AT + 501)
    assert region.lag_versions == 0
    assert {point.lag_s for point in region.deltas} == {0.0}


def test_a_region_without_a_replica_is_behind_by_everything():
    fold = fold_of(*published_and_relayed(0, AT), *published_and_relayed(1, AT + 5))
    region = west(fold, AT + 9)
    assert (region.lag_versions, region.lag_s) == (2, 9.0)


def test_prometheus_sees_the_lag():
    fold = fold_of(*published_and_relayed(0, AT), *published_and_relayed(1, AT + 5))
    lines = exposition(fold.state(AT + 9)).decode().splitlines()
    for line in (
        'penstock_weight_lag_versions{region="west"} 2.0',
        'penstock_weight_lag_seconds{region="west"} 9.0',
        'penstock_relayed_bytes_total{region="west"} 200.0',
    ):
        assert line in lines


def told(replica: str, policy_version: int, **changes: object) -> ReplicaReported:
    fields: dict = {"region": "west", "replica": replica, "started_at": AT, "serves": []}
    return ReplicaReported(**{**fields, "policy_version": policy_version, **changes})


def test_a_replica_that_left_or_is_silent_holds_no_region_back_and_is_named():
    fold = fold_of(
        *(entry for v in range(4) for entry in published_and_relayed(v, AT + v)),
        (AT + 10, told("west.a", 3)),
        (AT + 10, told("west.b", 1)),
        (AT + 10, told("west.c", 0, is_leaving=True)),
    )
    region = west(fold, AT + 11)
    assert (region.lag_versions, region.lost) == (2, ["west.c"])
    fold.apply(told("west.a", 3), AT + 25)
    region = west(fold, AT + 25)
    assert (region.lag_versions, region.lost) == (0, ["west.b", "west.c"])
    assert region.replicas == {"west.a": 3, "west.b": 1, "west.c": 0}


def test_a_replica_that_goes_back_to_an_evaluations_version_is_shown_there():
    fold = fold_of(
        *(entry for v in range(4) for entry in published_and_relayed(v, AT + v)),
        (AT + 10, applied("west.a", 2, 3)),
        (AT + 11, told("west.a", 1)),
    )
    assert west(fold, AT + 12).replicas == {"west.a": 1}


def test_verdicts_of_a_wrong_version_are_told():
    result = EvalCompleted(
        eval_id="v3", policy_version=3, num_solved=1, num_tasks=2, num_wrong_version=2
    )
    state = fold_of((AT, result)).state(AT)
    assert state.evals[-1].num_wrong_version == 2
    assert "2 from a wrong version left out" in state.log[-1].text
    assert b"penstock_heldout_wrong_version 2.0" in exposition(state)


def test_a_regions_queue_time_is_the_mean_of_the_replicas_that_are_there():
    fold = fold_of(
        (AT, told("a", 0, queue_s=0.5)),
        (AT, told("b", 0, queue_s=2.5)),
        (AT, told("c", 0, queue_s=60.0)),
    )
    assert west(fold, AT + 1).queue_s == 21.0
    fold.apply(told("c", 0, queue_s=60.0, is_leaving=True), AT + 1)
    assert west(fold, AT + 2).queue_s == 1.5
    assert b'penstock_queue_seconds{region="west"} 1.5' in exposition(fold.state(AT + 2))
