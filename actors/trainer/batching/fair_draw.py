"""Which of the waiting live samples make a batch, and how much each user may move it. Pure.

The draw goes round by round over tenants, within a tenant over its users, each user's oldest sample
first: more traffic buys nobody more of a batch while others wait. Users are capped within their
tenant and tenants within the batch, not users within the batch: a tenant names its own users, so
that names made up would raise its share.

A sample's *pull* is |advantage| x sampled tokens, what the gradient sums up. No user has more than
`user_share_max` of its tenant's pull, no tenant more than `tenant_share_max` of the batch's; where
few are in the batch, `EQUAL_SHARES_MAX` equal shares instead. What is above is scaled down, and the
manifest says by how much (`SampleEntry.share`).
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

import msgspec

from penstock.actors.trainer.config import LiveConfig
from penstock.messages.training import SampleEntry

EQUAL_SHARES_MAX = 1.5
"""With n users that pull, a cap below this many n-ths is raised to that: else a user without
advantage would hold all others to nothing."""
K = TypeVar("K", bound=Hashable)
User = tuple[str, str]
"""Tenant, and its user."""


def user_of(sample: SampleEntry) -> User:
    """Return whose sample it is."""
    return sample.tenant, sample.user


def draw(
    waiting: Iterable[SampleEntry], num_max: int, served: Mapping[User, int]
) -> list[SampleEntry]:
    """Return the samples of the next batch, in the order in which they were drawn.

    Args:
        waiting: All that may be trained, oldest first.
        num_max: Most that the batch takes.
        served: When each user was served last, in any unit; those served longest ago begin.

    """
    queues: dict[str, dict[User, list[SampleEntry]]] = {}
    for sample in waiting:
        of_tenant = queues.setdefault(sample.tenant, {})
        of_tenant.setdefault(user_of(sample), []).append(sample)

    def last_served(user: User) -> int:
        return served.get(user, 0)

    tenants = [
        _in_turn([users[user] for user in sorted(users, key=last_served)])
        for _, users in sorted(
            queues.items(), key=lambda item: max(last_served(user) for user in item[1])
        )
    ]
    drawn: list[SampleEntry] = []
    while tenants and len(drawn) < num_max:
        for turn in list(tenants):
            sample = next(turn, None)
            if sample is None:
                tenants.remove(turn)
            elif len(drawn) < num_max:
                drawn.append(sample)
    return drawn


def _in_turn(queues: Sequence[Sequence[SampleEntry]]) -> Iterator[SampleEntry]:
    for place in range(max(map(len, queues))):
        for queue in queues:
            if place < len(queue):
                yield queue[place]


def capped(samples: Sequence[SampleEntry], config: LiveConfig) -> list[SampleEntry]:
    """Return the trained samples of a batch, their advantages scaled down to the caps."""
    pulls = [pull_of(sample) for sample in samples]
    users = _totals(samples, pulls, user_of)
    factors: dict[User, float] = {}
    for tenant in {user[0]: None for user in users}:
        own = {user: total for user, total in users.items() if user[0] == tenant}
        factors |= _factors(own, config.user_share_max)
    pulls = [pull * factors[user_of(sample)] for sample, pull in zip(samples, pulls, strict=True)]
    of_tenant = _factors(_totals(samples, pulls, lambda each: each.tenant), config.tenant_share_max)
    return [
        scaled(sample, factors[user_of(sample)] * of_tenant[sample.tenant]) for sample in samples
    ]


def pull_of(sample: SampleEntry) -> float:
    """Return |advantage| x sampled tokens."""
    num_tokens = sum(span.num_tokens for span in sample.version_spans)
    turns = sample.turn_advantages or [sample.advantage]
    return num_tokens * sum(map(abs, turns)) / len(turns)


def scaled(sample: SampleEntry, share: float) -> SampleEntry:
    """Return a sample of whose advantage so much is left."""
    if share == 1.0:
        return sample
    return msgspec.structs.replace(
        sample,
        advantage=sample.advantage * share,
        turn_advantages=[value * share for value in sample.turn_advantages],
        share=share,
    )


def _totals(
    samples: Sequence[SampleEntry], pulls: Sequence[float], name: Callable[[SampleEntry], K]
) -> dict[K, float]:
    totals: dict[K, float] = {}
    for sample, pull in zip(samples, pulls, strict=True):
        totals[name(sample)] = totals.get(name(sample), 0.0) + pull
    return totals


def _factors(totals: Mapping[K, float], share_max: float) -> dict[K, float]:
    """Return what is left of each total so that none is above its share of what is left of all."""
    level = _level([total for total in totals.values() if total > 0], share_max)
    return {name: level / total if total > level else 1.0 for name, total in totals.items()}


def _level(totals: list[float], share_max: float) -> float:
    """Return L such that the totals, each cut at L, have at most their share of their sum.

    With the k largest cut, L = share (k L + the rest), so L = share rest / (1 - share k).
    """
    share = max(share_max, EQUAL_SHARES_MAX / max(len(totals), 1))
    level = float("inf")
    if share >= 1.0:
        return level
    rests = list(accumulate(sorted(totals)))  # The smallest first: small ones are not lost.
    for num_cut, (rest, largest) in enumerate(zip(rests[::-1], sorted(totals)[::-1], strict=True)):
        if share * num_cut >= 1.0:
            break
        level = share * rest / (1.0 - share * num_cut)
        if largest <= level:
            break
    return level
