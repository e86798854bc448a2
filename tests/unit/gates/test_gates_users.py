"""What is observed of users: each once, whole or not, whoever rates or does not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.gatekeeper.config import LiveTestConfig
from penstock.actors.gatekeeper.users import (
    NUM_USERS_FREE,
    ReplyObservation,
    RewardObservation,
    RunningReplyMeasures,
    Users,
    WindowEnd,
)
from penstock.messages.gates import Arm, ReplyFacts, Variant

FACTS = ReplyFacts(num_tokens=7, tools={"edit_file": 1}, num_calls=1)


def reply(users: Users, user="u", *, at=0.0, session="s", arm=Arm.STABLE, tenant="t", period=0):
    variant = Variant(0, period, arm)
    return list(users.add_reply(
        variant, 0.5, tenant=tenant, user=user, session=session, facts=FACTS, at=at
    ))  # fmt: skip


def rate(users: Users, user="u", *, sample="a", reward=1.0, arm=Arm.STABLE):
    return list(users.add_reward(
        Variant(0, 0, arm), 0.5, tenant="t", user=user, sample=sample, reward=reward
    ))  # fmt: skip


def made(**changes) -> Users:
    return Users(LiveTestConfig(**{**_FIELDS, **changes}), frozenset({"edit_file"}))


_FIELDS = {"sessions_per_user": 2, "replies_per_user": 3, "user_window_s": 100.0}


def test_replies_are_observed_whether_anybody_rates_them_or_not():
    users = made()
    found = [one for n in range(4) for one in reply(users, at=float(n))]
    seen = RunningReplyMeasures
    assert [type(one) for one in found] == [seen, seen, seen, ReplyObservation, seen]
    assert found[3].replies.measures()["edit_rate"] == 1.0


def test_a_user_who_left_after_one_broken_reply_is_observed_when_the_window_is_over():
    users = made()
    reply(users)
    found = reply(users, "other", at=101.0)
    assert [type(one) for one in found] == [ReplyObservation, WindowEnd, RunningReplyMeasures]
    assert found[1].unrated == 1.0


def test_a_reward_is_that_of_the_first_sessions_and_follows_revisions_until_then():
    users = made()
    reply(users)
    assert rate(users, reward=1.0) == []
    assert rate(users, reward=None) == []
    assert rate(users, reward=0.0) == []
    found = rate(users, sample="b", reward=1.0)
    assert found == [RewardObservation(Arm.STABLE, 0.5, 0.5, 2, "t")]
    assert rate(users, sample="c", reward=1.0) == []


def test_a_new_period_observes_a_user_again_and_the_other_arm_never_within_one():
    users = made(replies_per_user=1)
    assert len(reply(users)) == 2
    assert reply(users, arm=Arm.CANDIDATE) == []
    assert len(reply(users, period=1, arm=Arm.CANDIDATE)) == 2


def test_users_that_one_tenant_makes_up_do_not_decide():
    users = made(replies_per_user=1)
    honest = sum(len(reply(users, f"h{n}", tenant=f"t{n % 10}")) for n in range(200))
    made_up = sum(len(reply(users, f"x{n}", tenant="x")) for n in range(5000))
    assert honest == 400
    assert made_up / (honest + made_up) < 0.4
    assert users.num_uncounted > 4800


def test_one_tenant_alone_is_not_held_back():
    users = made(replies_per_user=1)
    assert sum(len(reply(users, f"u{n}")) for n in range(500)) == 1000


def test_users_are_bounded():
    users = made(users_max=NUM_USERS_FREE)
    for n in range(NUM_USERS_FREE + 5):
        reply(users, f"u{n}")
    assert users.num_uncounted == 5


events = st.lists(
    st.tuples(
        st.sampled_from(["u", "v", "w"]), st.booleans(), st.sampled_from("abc"), st.floats(0, 50)
    ),
    max_size=40,
)


@given(events)
def test_each_user_is_observed_at_most_once_a_period(steps):
    users, found, now = made(), [], 0.0
    for user, is_reply, sample, pause_s in steps:
        now += pause_s
        arm = Arm.CANDIDATE if user == "u" else Arm.STABLE
        found += reply(users, user, at=now, arm=arm) if is_reply else rate(
            users, user, sample=sample, arm=arm
        )  # fmt: skip
    for kind in (ReplyObservation, RewardObservation, WindowEnd):
        assert sum(isinstance(one, kind) for one in found) <= 3
        assert sum(isinstance(one, kind) and one.arm is Arm.CANDIDATE for one in found) <= 1


@pytest.mark.parametrize("reward", [-3.0, 7.0])
def test_rewards_are_brought_into_their_bounds(reward):
    users = made(sessions_per_user=1)
    [found] = rate(users, reward=reward)
    assert found.reward in {0.0, 1.0}
