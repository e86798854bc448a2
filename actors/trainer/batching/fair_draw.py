"""Draws live samples into a batch, and bounds how far each user may move it. Pure.

The draw goes round by round over tenants, and within a tenant over its users, each user's oldest
sample first: more traffic buys nobody a larger part while others wait. Even if nobody else waits,
no user gets more than `user_share_max` of its tenant's samples in a batch, no tenant more than
`tenant_share_max` of the batch, so a flood creates no versions of its own. With few users present
or recently present, the cap is `EQUAL_SHARES_MAX` equal shares instead. The rest waits.

The same caps bound a sample's *pull*, |advantage| x sampled tokens, which the gradient sums up:
whatever exceeds them is scaled down, and the manifest records the factor (`SampleEntry.share`).

Users are capped within their tenant and tenants within the batch, not users within the batch: a
tenant names its own users, so invented names would raise its share.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

import msgspec

from penstock.actors.trainer.config import LiveConfig
from penstock.messages.training import SampleEntry

EQUAL_SHARES_MAX = 1.5
"""Least cap in equal shares: with n users, a cap below this many n-ths is raised to it."""


class OwnedSample(Protocol):
    """Anything a user may have in a batch: a sample, a correction, a judgment."""

    @property
    def tenant(self) -> str:
        """Tenant of the user."""
        ...

    @property
    def user(self) -> str:
        """Pseudonym of the user."""
        ...


K = TypeVar("K", bound=Hashable)
Item = TypeVar("Item", bound=OwnedSample)
NUM_RECENT = 512
"""Trained samples whose users count as present. A flood at night is thus not alone, and a single
user of a service is not capped for long."""
User = tuple[str, str]
"""Tenant and user."""


def user_of(sample: OwnedSample) -> User:
    """Return the owner of a sample."""
    return sample.tenant, sample.user


class RecentUsers:
    """Users whose samples were trained recently: a fold of manifests."""

    def __init__(self) -> None:
        self._users: deque[User] = deque(maxlen=NUM_RECENT)

    def add(self, trained: Iterable[OwnedSample]) -> None:
        """Add the trained samples of a stored manifest, in order."""
        self._users.extend(map(user_of, trained))

    def shares(self, samples: Iterable[OwnedSample], config: LiveConfig) -> "Shares":
        """Return the share caps that hold while these samples wait, or in a batch of them."""
        users = {*self._users, *map(user_of, samples)}
        tenants = Counter(tenant for tenant, _ in users)
        return Shares(
            tenant=max(config.tenant_share_max, EQUAL_SHARES_MAX / max(len(tenants), 1)),
            users={
                tenant: max(config.user_share_max, EQUAL_SHARES_MAX / count)
                for tenant, count in tenants.items()
            },
        )


class Shares(msgspec.Struct, frozen=True, kw_only=True):
    """Share caps of a batch."""

    tenant: float
    """Cap of each tenant's part of the batch."""
    users: dict[str, float]
    """Cap of each user's part of its tenant's samples, by tenant."""


def draw(
    waiting: Iterable[Item], shares: Shares, served: Mapping[User, int], num_max: int
) -> list[Item]:
    """Return the samples of the next batch in draw order.

    Args:
        waiting: All samples that may be trained, oldest first.
        shares: Share caps.
        served: Time at which each user was last served, in any unit; the longest ago come first.
        num_max: Maximum size of the batch.

    """
    queues: dict[str, dict[User, list[Item]]] = {}
    for sample in waiting:
        of_tenant = queues.setdefault(sample.tenant, {})
        of_tenant.setdefault(user_of(sample), []).append(sample)

    def last_served(user: User) -> int:
        return served.get(user, 0)

    rows: list[list[Item]] = []
    for tenant, users in sorted(queues.items(), key=lambda item: max(map(last_served, item[1]))):
        most = _num_drawn_max([len(queue) for queue in users.values()], shares.users[tenant])
        in_order = sorted(users, key=last_served)
        rows.append(list(_in_turn([users[user][:most] for user in in_order])))
    most = _num_drawn_max([len(row) for row in rows], shares.tenant)
    return list(_in_turn([row[:most] for row in rows]))[:num_max]


def _num_drawn_max(counts: list[int], share: float) -> int:
    """Return how many samples of one owner may be drawn, at least one."""
    return max(1, int(min(_level([float(count) for count in counts], share), sum(counts))))


def _in_turn(queues: Sequence[Sequence[Item]]) -> Iterator[Item]:
    for place in range(max(map(len, queues), default=0)):
        for queue in queues:
            if place < len(queue):
                yield queue[place]


def capped(samples: Sequence[SampleEntry], shares: Shares) -> list[SampleEntry]:
    """Return a batch's trained samples with advantages scaled down to the caps."""
    pulls = [pull_of(sample) for sample in samples]
    users = _totals(samples, pulls, user_of)
    factors: dict[User, float] = {}
    for tenant in {user[0]: None for user in users}:
        own = {user: total for user, total in users.items() if user[0] == tenant}
        factors |= _factors(own, shares.users[tenant])
    pulls = [pull * factors[user_of(sample)] for sample, pull in zip(samples, pulls, strict=True)]
    of_tenant = _factors(_totals(samples, pulls, lambda each: each.tenant), shares.tenant)
    return [
        scaled(sample, factors[user_of(sample)] * of_tenant[sample.tenant]) for sample in samples
    ]


def pull_of(sample: SampleEntry) -> float:
    """Return |advantage| x sampled tokens x weight."""
    num_tokens = sum(span.num_tokens for span in sample.version_spans)
    turns = sample.turn_advantages or [sample.advantage]
    return sample.weight * num_tokens * sum(map(abs, turns)) / len(turns)


def scaled(sample: SampleEntry, share: float) -> SampleEntry:
    """Return a sample with its advantage scaled to `share`."""
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


def _factors(totals: Mapping[K, float], share: float) -> dict[K, float]:
    """Return the factor for each total that keeps it within its share."""
    level = _level([total for total in totals.values() if total > 0], share)
    return {name: level / total if total > level else 1.0 for name, total in totals.items()}


def _level(totals: list[float], share: float) -> float:
    """Return L such that no total, cut at L, exceeds its share of what is left.

    With the k largest cut, L = share (k L + rest), so L = share rest / (1 - share k). If there are
    too
    few for any cut above 0, each gets its share of the original sum.

    """
    if share >= 1.0:
        return float("inf")
    if share * len(totals) <= 1.0:
        return share * sum(totals)
    level = 0.0
    # Ascending, so that small totals are not lost in the rounding of a large sum.
    rests = list(accumulate(sorted(totals)))
    for num_cut, (rest, largest) in enumerate(zip(rests[::-1], sorted(totals)[::-1], strict=True)):
        if share * num_cut >= 1.0:
            break
        level = share * rest / (1.0 - share * num_cut)
        if largest <= level:
            break
    return level
