"""The draw and the caps, whatever waits: nobody lost, nobody above its share, nobody twisted."""

import math
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.trainer.batching.fair_draw import (
    EQUAL_SHARES_MAX,
    RecentUsers,
    Shares,
    capped,
    draw,
    pull_of,
)
from penstock.actors.trainer.config import LiveConfig
from penstock.messages.reward import Outcome
from penstock.messages.rollout import VersionSpan
from penstock.messages.training import SampleEntry


def sample(number, tenant, user, advantage, num_tokens, turns=()):
    return SampleEntry(
        rollout_id=f"r{number}",
        outcome=Outcome.SOLVED,
        reward=0.5,
        advantage=advantage,
        turn_advantages=list(turns),
        tenant=tenant,
        user=user,
        version_spans=[VersionSpan(policy_version=0, num_tokens=num_tokens)],
    )


advantages = st.one_of(st.just(0.0), st.floats(-1.0, 1.0), st.sampled_from([1e-12, -1.0, 1.0]))
drawn = st.tuples(
    st.sampled_from("abcdef"),
    st.sampled_from("uvwxyz"),
    advantages,
    st.integers(1, 4000),
    st.lists(advantages, max_size=3),
)
batches = st.lists(drawn, min_size=1, max_size=60).map(
    lambda rows: [sample(number, *row) for number, row in enumerate(rows)]
)
fractions = st.floats(0.01, 1.0)
configs = st.builds(LiveConfig, user_share_max=fractions, tenant_share_max=fractions)
WITHOUT_CAPS = LiveConfig(user_share_max=1.0, tenant_share_max=1.0)


def shares_of(samples, config, recent=()):
    users = RecentUsers()
    users.add(recent)
    return users.shares(samples, config)


def totals(samples, name):
    found = {}
    for each in samples:
        found[name(each)] = found.get(name(each), 0.0) + pull_of(each)
    return {key: value for key, value in found.items() if value > 0}


def check_shares(before, after, share):
    """Nobody has more than a share of what is left; of too few, of what there was."""
    whole = after if share * len(after) > 1.0 else before
    most = share * math.fsum(whole.values())
    assert all(value <= most * (1 + 1e-6) for value in after.values())


@given(batches, batches, configs)
def test_no_user_and_no_tenant_is_above_its_share(samples, recent, config):
    shares = shares_of(samples, config, recent)
    after = capped(samples, shares)
    in_tenants = {each.tenant for each in after}
    for tenant in in_tenants:
        own = [
            totals([each for each in part if each.tenant == tenant], lambda each: each.user)
            for part in (samples, after)
        ]
        if share_is_of_what_is_left(own[0], shares.users[tenant]):
            check_shares(*own, shares.users[tenant])
    by_tenant = [totals(part, lambda each: each.tenant) for part in (samples, after)]
    check_shares(*by_tenant, shares.tenant)


def share_is_of_what_is_left(before, share):
    """Tenants are scaled after their users: shares within stay, absolute sizes do not."""
    return share * len(before) > 1.0


@given(batches, configs)
def test_caps_only_scale_down_and_erase_nobody(samples, config):
    after = capped(samples, shares_of(samples, config))
    for one, other in zip(samples, after, strict=True):
        assert one.rollout_id == other.rollout_id
        assert 0.0 < other.share <= 1.0
        assert other.advantage == one.advantage * other.share
        assert other.turn_advantages == [each * other.share for each in one.turn_advantages]


@given(batches)
def test_who_is_within_the_caps_is_untouched(samples):
    assert capped(samples, shares_of(samples, WITHOUT_CAPS)) == samples


@given(
    batches, st.integers(0, 70), st.dictionaries(st.tuples(st.just("a"), st.just("u")), fractions)
)
def test_without_caps_the_draw_takes_all_it_can_round_by_round(samples, num_max, served):
    taken = draw(samples, shares_of(samples, WITHOUT_CAPS), served, num_max)
    assert len(taken) == min(num_max, len(samples))
    assert len({each.rollout_id for each in taken}) == len(taken)
    left = [each for each in samples if each not in taken]
    counts = Counter(each.tenant for each in taken)
    for each in left:
        assert counts[each.tenant] >= max(counts.values(), default=0) - 1, "others got two more"
    order = {}
    for each in taken:
        order.setdefault((each.tenant, each.user), []).append(samples.index(each))
    assert all(places == sorted(places) for places in order.values()), "each user's oldest first"


@given(st.integers(0, 500), st.lists(st.integers(1, 4), min_size=1, max_size=30))
def test_a_flood_gets_no_more_than_its_share_of_a_batch_that_others_leave_empty(num_loud, counts):
    quiet = [
        sample(1000 + 10 * tenant + n, f"t{tenant}", "u", 0.5, 10)
        for tenant, count in enumerate(counts)
        for n in range(count)
    ]
    loud = [sample(n, "loud", f"u{n % 7}", -1.0, 10) for n in range(num_loud)]
    shares = shares_of([*loud, *quiet], LiveConfig(tenant_share_max=0.1))
    taken = draw([*loud, *quiet], shares, {}, 1000)
    num_taken = sum(each.tenant == "loud" for each in taken)
    share = max(0.1, EQUAL_SHARES_MAX / (len(counts) + bool(num_loud)))
    assert num_taken <= max(1, share * len(taken))


@given(st.integers(1, 300), st.integers(4, 30))
def test_a_flood_makes_no_batch_of_its_own_while_others_were_there_lately(num_loud, num_quiet):
    """It had all the samples of every second version, as soon as nobody else was waiting."""
    recent = [sample(1000 + n, f"t{n}", "u", 0.5, 10) for n in range(num_quiet)]
    loud = [sample(n, "loud", "u", -1.0, 10) for n in range(num_loud)]
    shares = shares_of(loud, LiveConfig(tenant_share_max=0.1), recent)
    taken = draw(loud, shares, {}, 1000)
    assert len(taken) <= max(1, EQUAL_SHARES_MAX / (num_quiet + 1) * num_loud, 0.1 * num_loud)
    pull = sum(map(pull_of, capped(loud, shares)))
    assert pull <= max(0.1, EQUAL_SHARES_MAX / (num_quiet + 1)) * sum(map(pull_of, loud)) * 1.001


@given(st.integers(1, 200), st.integers(2, 12))
def test_names_made_up_by_a_tenant_buy_it_nothing(num_names, num_honest):
    """A tenant names its own users: as one user or as two hundred, it has one tenant's share."""
    honest = [sample(n, f"t{n}", "u", 0.5, 10) for n in range(num_honest)]
    sybils = [sample(100 + n, "evil", f"u{n}", -1.0, 10) for n in range(num_names)]
    samples = [*honest, *sybils]
    found = totals(
        capped(samples, shares_of(samples, LiveConfig(tenant_share_max=0.05))),
        lambda each: each.tenant,
    )
    share = max(0.05, EQUAL_SHARES_MAX / (num_honest + 1))
    assert found["evil"] <= share * sum(found.values()) * (1 + 1e-9)


def test_shares_are_never_below_an_equal_one():
    users = [sample(n, f"t{n % 3}", f"u{n}", 0.5, 10) for n in range(6)]
    found = shares_of(users, LiveConfig(user_share_max=0.01, tenant_share_max=0.01))
    assert found == Shares(tenant=0.5, users={"t0": 0.75, "t1": 0.75, "t2": 0.75})
