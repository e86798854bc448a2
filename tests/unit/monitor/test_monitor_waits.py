"""Why the run waits, in words."""

from penstock.actors.monitor.state import ActorView
from penstock.actors.monitor.wait_graph import explain
from penstock.messages.telemetry import Wait

NOW = 1000.0


def actor(
    role: str, *waits: Wait, at: float = NOW, busy: float = 0.5, error: str = ""
) -> ActorView:
    return ActorView(
        role=role, at=at, busy_fraction_recent=busy, waits=list(waits), last_error=error
    )


def wait(target: str, for_s: float, deadline_s: float = 60.0, reason: str = "") -> Wait:
    return Wait(target=target, reason=reason, since=NOW - for_s, deadline_s=deadline_s)


def test_the_longest_chain_is_told_to_its_root():
    actors = {
        "trainer": actor("trainer", wait("rollouts", 9.0, reason="step 3")),
        "worker-0": actor("rollout_worker", wait("generate.train", 4.0)),
        "worker-1": actor("rollout_worker"),
        "generator-west": actor("generator", busy=0.97),
        "judge-0": actor("judge", wait("sandbox.host-0", 30.0)),
    }
    stall = explain(actors, NOW, quiet_s=1.0)
    assert [(edge.actor, edge.target) for edge in stall.chain] == [
        ("trainer", "rollouts"),
        ("worker-0", "generate.train"),
    ]
    assert stall.root == "generator-west"
    assert not stall.is_stalled
    assert stall.words == (
        "trainer has waited 9.0 s for rollouts (step 3), "
        "which has waited 4.0 s for generate.train; generator-west is working (97% busy)"
    )


def test_a_request_at_one_replica_waits_for_that_one():
    actors = {
        "worker-0": actor("rollout_worker", wait("generate.train.west.a", 4.0)),
        "generator-west.a": actor("generator", at=NOW - 9.0),
        "generator-west.b": actor("generator", wait("engine", 30.0)),
    }
    assert explain(actors, NOW, quiet_s=1.0).root == "generator-west.a"
    actors["worker-0"] = actor("rollout_worker", wait("abort.west.b", 4.0))
    assert [edge.actor for edge in explain(actors, NOW, quiet_s=1.0).chain][1] == "generator-west.b"


def test_a_silent_actor_is_the_root_with_its_last_error():
    actors = {
        "trainer": actor("trainer", wait("judge", 40.0, deadline_s=30.0)),
        "judge-0": actor("judge", wait("sandbox", 39.0), at=NOW - 38.0, error="OSError: no space"),
        "judge-1": actor("judge"),
    }
    stall = explain(actors, NOW, quiet_s=39.0)
    assert stall.root == "judge-0"
    assert stall.is_stalled
    assert stall.words == (
        "nothing has moved for 39 s: trainer has waited 40.0 s for judge past its deadline; "
        "judge-0 has not reported for 38 s (last error: OSError: no space)"
    )


def test_a_circle_is_a_deadlock():
    actors = {
        "a": actor("a", wait("b", 20.0)),
        "b": actor("b", wait("c", 20.0)),
        "c": actor("c", wait("a", 20.0)),
    }
    stall = explain(actors, NOW, quiet_s=20.0)
    assert len(stall.chain) == 3
    assert "that is a deadlock: a is part of the chain" in stall.words


def test_a_thing_may_be_what_all_wait_for():
    stall = explain({"trainer": actor("trainer", wait("group 12", 5.0))}, NOW, quiet_s=0.0)
    assert stall.root == "group 12"
    assert stall.words.endswith("everything waits for group 12")


def test_short_waits_are_no_stall_and_missing_actors_are_named():
    calm = {"worker-0": actor("rollout_worker", wait("generator", 0.1))}
    assert explain(calm, NOW, quiet_s=0.0).words == "nothing is waiting"
    gone = {"trainer": actor("trainer", at=NOW - 30.0), "pacer": actor("pacer")}
    stall = explain(gone, NOW, quiet_s=30.0)
    assert (stall.is_stalled, stall.root) == (True, "trainer")
    assert "nothing is waiting, but no reports come from trainer" in stall.words
