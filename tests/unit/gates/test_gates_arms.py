"""Arms of an experiment: sticky, independent between experiments, with a recorded propensity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.arms import Arms, Route
from penstock.gateway.exchange.choice import reply_facts
from penstock.messages.gates import (
    NUM_TOOLS_MAX,
    Arm,
    Decision,
    ExperimentDecided,
    ExperimentStarted,
    Variant,
    parse_variant,
)
from penstock.messages.rollout import ToolCall

DAY_S = 86400.0


def started(number=0, share=0.5, salt="salt", at=100.0) -> ExperimentStarted:
    return ExperimentStarted(
        number=number,
        policy_version=7,
        stable_version=3,
        share=share,
        salt=salt,
        sticky_s=7 * DAY_S,
        at=at,
    )


def decided(number=0) -> ExperimentDecided:
    return ExperimentDecided(
        number=number,
        decision=Decision.ROLLED_BACK,
        policy_version=7,
        stable_version=3,
        reason="worse",
        at=200.0,
    )


def arms_of(*events) -> Arms:
    arms = Arms("stable")
    for event in events:
        arms.started(event) if isinstance(event, ExperimentStarted) else arms.decided(event)
    return arms


def test_without_an_experiment_everyone_gets_the_gateways_channel():
    assert Arms("newest").route("u-1", 0.0) == Route(channel="newest")


@given(st.text(max_size=30), st.floats(100.0, 100.0 + 6.9 * DAY_S))
def test_a_user_stays_in_one_arm_on_every_gateway(user, now):
    first, second = arms_of(started()), arms_of(started())
    assert first.route(user, 100.0) == second.route(user, now)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_of_users_is_the_propensity_on_record(share):
    routes = [arms_of(started(share=share)).route(f"u-{i}", 100.0) for i in range(4000)]
    candidates = [route for route in routes if route.channel == Arm.CANDIDATE]
    assert abs(len(candidates) / 4000 - share) < 4 * (share * (1 - share) / 4000) ** 0.5
    assert {route.propensity for route in candidates} == {share}
    assert {r.propensity for r in routes if r.channel == Arm.STABLE} == {1 - share}


@pytest.mark.parametrize("other", [started(number=1, salt="other"), started(at=100.0 - 8 * DAY_S)])
def test_arms_are_drawn_again_by_the_next_experiment_and_in_the_next_period(other):
    one, two = arms_of(started()), arms_of(other)
    same = [one.route(f"u-{i}", 100.0).channel == two.route(f"u-{i}", 100.0).channel
            for i in range(4000)]  # fmt: skip
    assert abs(sum(same) / 4000 - 0.5) < 0.04


def test_a_decision_sends_everyone_back_and_an_older_start_changes_nothing():
    arms = arms_of(started(), decided(), started())
    assert arms.route("u-1", 100.0) == Route(channel="stable")
    arms.started(started(number=1))
    arms.decided(decided(number=0))
    assert parse_variant(arms.route("u-1", 100.0).variant).number == 1


@given(st.integers(0, 10**9 - 1), st.integers(0, 10**9 - 1), st.sampled_from(Arm))
def test_a_variant_reads_as_it_is_written(number, period, arm):
    assert parse_variant(str(Variant(number, period, arm))) == Variant(number, period, arm)


@pytest.mark.parametrize("text", ["", "current", "e1.0.both", "e1.0.stable\n", "e\u0661.0.stable"])
def test_other_texts_are_no_variant(text):
    assert parse_variant(text) is None


def facts(text="", calls=(), *, broken=False):
    made = [ToolCall(name=name, arguments={}) for name in calls]
    return reply_facts(text, made, num_tokens=3, offered={"read", "write"}, is_broken=broken)


def test_facts_of_a_reply():
    assert facts(" \n").is_empty
    assert not facts(calls=["read"]).is_empty
    assert facts("Which file do you mean?").is_question
    assert facts('I can do that.\n\nShall I ("really?") ').is_question
    assert not facts("Why? Because x ? y : z was wrong.\n\nDone.").is_question
    assert not facts("Shall I?", ["read"]).is_question
    assert facts(calls=["gone"]).is_invalid
    assert facts("<call", broken=True).is_invalid
    assert facts(calls=["read", "write", "read"]).tools == {"read": 2, "write": 1}
    assert len(reply_facts(
        "", [ToolCall(name=str(i), arguments={}) for i in range(99)], num_tokens=1,
        offered=set(map(str, range(99))), is_broken=False).tools) == NUM_TOOLS_MAX  # fmt: skip
