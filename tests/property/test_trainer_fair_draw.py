"""The draw and the caps, whatever waits: nobody lost, nobody above its share, nobody twisted."""

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.trainer.batching.fair_draw import EQUAL_SHARES_MAX, capped, draw, pull_of
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
shares = st.floats(0.01, 1.0)


def totals(samples, name):
    found = {}
    for each in samples:
        found[name(each)] = found.get(name(each), 0.0) + pull_of(each)
    return found


def check_shares(found, share_max):
    """Nobody has more than the cap, or than one and a half equal shares where few are there."""
    num_pulling = sum(value > 0 for value in found.values())
    share = max(share_max, EQUAL_SHARES_MAX / max(num_pulling, 1))
    whole = math.fsum(found.values())
    assert all(value <= share * whole * (1 + 1e-6) for value in found.values())


@given(batches, shares, shares)
def test_no_user_and_no_tenant_is_above_its_share(samples, user_max, tenant_max):
    config = LiveConfig(user_share_max=user_max, tenant_share_max=tenant_max)
    after = capped(samples, config)
    check_shares(totals(after, lambda each: each.tenant), tenant_max)
    for tenant in {each.tenant for each in samples}:
        own = [each for each in after if each.tenant == tenant]
        check_shares(totals(own, lambda each: each.user), user_max)


@given(batches, shares, shares)
def test_caps_only_scale_down_and_erase_nobody(samples, user_max, tenant_max):
    config = LiveConfig(user_share_max=user_max, tenant_share_max=tenant_max)
    for before, after in zip(samples, capped(samples, config), strict=True):
        assert before.rollout_id == after.rollout_id
        assert 0.0 < after.share <= 1.0
        assert after.advantage == before.advantage * after.share
        assert after.turn_advantages == [each * after.share for each in before.turn_advantages]


@given(batches)
def test_who_is_within_the_caps_is_untouched(samples):
    assert capped(samples, LiveConfig(user_share_max=1.0, tenant_share_max=1.0)) == samples


@given(batches, st.integers(0, 70), st.dictionaries(st.tuples(st.just("a"), st.just("u")), shares))
def test_the_draw_takes_all_it_can_round_by_round(samples, num_max, served):
    taken = draw(samples, num_max, served)
    assert len(taken) == min(num_max, len(samples))
    assert len({each.rollout_id for each in taken}) == len(taken)
    left = [each for each in samples if each not in taken]
    counts = {name: 0 for name in (each.tenant for each in samples)}
    for each in taken:
        counts[each.tenant] += 1
    for each in left:
        assert counts[each.tenant] >= max(counts.values()) - 1, "others got two more, it waits"
    order = {}
    for each in taken:
        order.setdefault((each.tenant, each.user), []).append(samples.index(each))
    assert all(places == sorted(places) for places in order.values()), "each user's oldest first"


@given(st.integers(1, 200), st.integers(2, 12))
def test_names_made_up_by_a_tenant_buy_it_nothing(num_names, num_honest):
    """A tenant names its own users: as one user or as two hundred, it has one tenant's share."""
    honest = [sample(n, f"t{n}", "u", 0.5, 10) for n in range(num_honest)]
    sybils = [sample(100 + n, "evil", f"u{n}", -1.0, 10) for n in range(num_names)]
    after = capped([*honest, *sybils], LiveConfig(tenant_share_max=0.05))
    found = totals(after, lambda each: each.tenant)
    share = max(0.05, EQUAL_SHARES_MAX / (num_honest + 1))
    assert found["evil"] <= share * sum(found.values()) * (1 + 1e-9)
