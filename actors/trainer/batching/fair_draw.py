"""Which of the waiting live samples make a batch, and how much each user may move it. Pure.

The draw goes round by round over tenants, within a tenant over its users, each user's oldest sample
first: more traffic buys nobody more of a batch while others wait. Nor where nobody else waits: no
user has more than `user_share_max` of its tenant's samples in a batch, no tenant more than
`tenant_share_max` of the batch's, so that a flood cuts no versions of its own. Where few are there
or were lately, it is `EQUAL_SHARES_MAX` equal shares instead. The rest waits.

The same caps hold for a sample's *pull*, |advantage| x sampled tokens, which is what the gradient
sums up: what is above is scaled down, and the manifest says by how much (`SampleEntry.share`).

Users are capped within their tenant and tenants within the batch, not users within the batch: a
tenant names its own users, so that names made up would raise its share.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Protocol, TypeVar

import msgspec

from penstock.actors.trainer.config import LiveConfig
from penstock.messages.training import SampleEntry

EQUAL_SHARES_MAX = 1.5
"""With n users, a cap below this many n-ths is raised to that: all caps together leave room."""


class Owned(Protocol):
    """What a user has in a batch: a sample, a correction, a judgment."""

    @property
    def tenant(self) -> str:
        """Whose user it is."""
        ...

    @property
    def user(self) -> str:
        """Pseudonym."""
        ...


K = TypeVar("K", bound=Hashable)
Item = TypeVar("Item", bound=Owned)
NUM_RECENT = 512
"""Trained samples whose users count as being there. So a flood at night is not alone there, and
who uses a service alone is not capped for long."""
User = tuple[str, str]
"""Tenant, and its user."""


def user_of(sample: Owned) -> User:
    """Return whose sample it is."""
    return sample.tenant, sample.user


class RecentUsers:
    """Whose samples were trained lately: a fold of manifests."""

    def __init__(self) -> None:
        self._users: deque[User] = deque(maxlen=NUM_RECENT)

    def add(self, trained: Iterable[Owned]) -> None:
        """Take in the trained samples of a stored manifest, in order."""
        self._users.extend(map(user_of, trained))

    def shares(self, samples: Iterable[Owned], config: LiveConfig) -> "Shares":
        """Return the largest shares while these samples wait, or make a batch."""
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
    """Largest shares of a batch."""

    tenant: float
    """Of a tenant in the batch."""
    users: dict[str, float]
    """Tenant -> of each of its users in the tenant's part."""


def draw(
    waiting: Iterable[Item], shares: Shares, served: Mapping[User, int], num_max: int
) -> list[Item]:
    """Return the samples of the next batch, in the order in which they were drawn.

    Args:
        waiting: All that may be trained, oldest first.
        shares: Bounds of each one's part.
        served: When each user was served last, in any unit; those served longest ago begin.
        num_max: Bound of the batch.

    """
    queues: dict[str, dict[User, list[Item]]] = {}
    for sample in waiting:
        of_tenant = queues.setdefault(sample.tenant, {})
        of_tenant.setdefault(user_of(sample), []).append(sample)

    def last_served(user: User) -> int:
        return served.get(user, 0)

    rows: list[list[Item]] = []
    for tenant, users in sorted(queues.items(), key=lambda item: max(map(last_served, item[1]))):
        most = _most([len(queue) for queue in users.values()], shares.users[tenant])
        in_order = sorted(users, key=last_served)
        rows.append(list(_in_turn([users[user][:most] for user in in_order])))
    most = _most([len(row) for row in rows], shares.tenant)
    return list(_in_turn([row[:most] for row in rows]))[:num_max]


def _most(counts: list[int], share: float) -> int:
    """Return how many samples of one may be drawn, at least one."""
    return max(1, int(min(_level([float(count) for count in counts], share), sum(counts))))


def _in_turn(queues: Sequence[Sequence[Item]]) -> Iterator[Item]:
    for place in range(max(map(len, queues), default=0)):
        for queue in queues:
            if place < len(queue):
                yield queue[place]


def capped(samples: Sequence[SampleEntry], shares: Shares) -> list[SampleEntry]:
    """Return the trained samples of a batch, their advantages scaled down to the caps."""
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


def _factors(totals: Mapping[K, float], share: float) -> dict[K, float]:
    """Return what is left of each total once none is above its share."""
    level = _level([total for total in totals.values() if total > 0], share)
    return {name: level / total if total > level else 1.0 for name, total in totals.items()}


def _level(totals: list[float], share: float) -> float:
    """Return L such that no total, each cut at L, has more than its share of what is left.

    With the k largest cut, L = share (k L + the rest), so L = share rest / (1 - share k). Where so
    few are there that no cut but 0 would do, it is their share of what there was.
    """
    if share >= 1.0:
        return float("inf")
    if share * len(totals) <= 1.0:
        return share * sum(totals)
    level = 0.0
    rests = list(accumulate(sorted(totals)))  # The smallest first: small ones are not lost.
    for num_cut, (rest, largest) in enumerate(zip(rests[::-1], sorted(totals)[::-1], strict=True)):
        if share * num_cut >= 1.0:
            break
        level = share * rest / (1.0 - share * num_cut)
        if largest <= level:
            break
    return level
