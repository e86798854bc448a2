"""Rate limits of a key: token buckets, and a bound on parallel requests. Pure; time is given.

Neither `limits` nor `aiolimiter` has a bucket that refuses with the time until a request fits and
that can be overdrawn (docs/decisions/libraries.md).

Limits that several gateways hold together, by compare-and-swap of `LimitsChanged` events.

```
 enter ──▶ what the newest event leaves ──▶ 429, and nothing is stored
               ▲            └──▶ the event after it ──swap──▶ admitted
               └── another gateway was quicker ◀──┘
```
A change takes one round trip to the event server, or three where another gateway was quicker. A
gateway that is killed leaves its requests open: the others count them until they must be over.
"""

import asyncio
import contextlib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from typing import Protocol

from penstock.actors.runtime.context import Context
from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeySpec
from penstock.messages.errors import PenstockError
from penstock.messages.requests.gateways import LimitsChanged, RequestsOpen

MINUTE_S = 60.0
NUM_USERS_MAX = 10_000
"""Of one key."""


class Bucket:
    """A token bucket that holds one minute's allowance and refills evenly.

    It may go below zero: what a reply cost is known only afterwards, and is owed.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def remaining(self, now: float) -> int:
        """Return how much may be spent now."""
        self._refill(now)
        return max(0, math.floor(self._level))

    def reset_s(self, now: float) -> float:
        """Return after how long the bucket is full again."""
        self._refill(now)
        return (self.limit - self._level) * MINUTE_S / self.limit

    def wait_s(self, amount: float, now: float) -> float:
        """Return after how long `amount` may be spent; 0 for now."""
        self._refill(now)
        return max(0.0, (min(amount, self.limit) - self._level) * MINUTE_S / self.limit)

    def level(self, now: float) -> float:
        """Return how much is in it; below zero, it is owed."""
        self._refill(now)
        return self._level

    def fill_to(self, level: float, at: float) -> None:
        """Take over what it held at a time."""
        self._level, self._at = level, at

    def spend(self, amount: float, now: float) -> None:
        """Take `amount` out."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self.limit / MINUTE_S
        self._level = min(float(self.limit), self._level + gained)
        self._at = max(self._at, now)


class Account:
    """What one key has left."""

    def __init__(self, key: KeySpec, now: float) -> None:
        self.requests = Bucket(key.rpm_limit, now)
        self.tokens = Bucket(key.tpm_limit, now)
        self.num_parallel = 0

    def enter(self, key: KeySpec, now: float) -> None:
        """Admit one request; `leave` must follow.

        Raises:
            ApiError: 429, with when to come back; nothing is spent.

        """
        self.requests.limit, self.tokens.limit = key.rpm_limit, key.tpm_limit
        if self.num_parallel >= key.max_parallel_requests:
            text = f"{key.max_parallel_requests} requests of this key are in progress already"
            raise _too_many("too_many_parallel_requests", text, 1.0)
        for bucket, what in ((self.requests, "requests"), (self.tokens, "tokens")):
            wait_s = bucket.wait_s(1.0, now)
            if wait_s > 0:
                text = f"the limit of {bucket.limit} {what} per minute is reached"
                raise _too_many("rate_limit_exceeded", text, wait_s)
        self.requests.spend(1.0, now)
        self.num_parallel += 1

    def leave(self, num_tokens: int, now: float) -> None:
        """End a request that `enter` admitted and charge its tokens."""
        self.num_parallel -= 1
        self.tokens.spend(num_tokens, now)

    def headers(self, now: float) -> dict[str, str]:
        """Return the `x-ratelimit-*` headers."""
        values: dict[str, str] = {}
        for name, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            values[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
            values[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now))
            values[f"x-ratelimit-reset-{name}"] = f"{bucket.reset_s(now):.3f}s"
        return values


class FeedbackAccount:
    """What one key, and each of its users, has left of feedback."""

    def __init__(self, key: KeySpec, now: float) -> None:
        self.pieces = Bucket(key.feedback_rpm_limit, now)
        self.kib = Bucket(key.feedback_kib_limit, now)
        self.users: OrderedDict[str, Bucket] = OrderedDict()
        """The one used longest ago goes first."""

    def admit(self, key: KeySpec, user: str, num_bytes: int, now: float) -> None:
        """Admit one piece of feedback on a request of a user, before it is stored.

        Raises:
            ApiError: 429, with when to come back; nothing is spent.

        """
        self.pieces.limit, self.kib.limit = key.feedback_rpm_limit, key.feedback_kib_limit
        of_user, num_kib = self._user(key, user, now), num_bytes / 1024
        for bucket, amount, what in (
            (self.pieces, 1.0, f"{key.feedback_rpm_limit} pieces of feedback"),
            (self.kib, num_kib, f"{key.feedback_kib_limit} KiB of feedback"),
            (of_user, 1.0, f"{key.user_feedback_rpm_limit} pieces of feedback of one user"),
        ):
            wait_s = bucket.wait_s(amount, now)
            if wait_s > 0:
                text = f"the limit of {what} per minute is reached"
                raise _too_many("feedback_limit_exceeded", text, wait_s)
        self.pieces.spend(1.0, now)
        self.kib.spend(num_kib, now)
        of_user.spend(1.0, now)

    def _user(self, key: KeySpec, user: str, now: float) -> Bucket:
        """Return a user's own bucket. A forgotten one is full again: its key's still bounds it."""
        bucket = self.users.setdefault(user, Bucket(key.user_feedback_rpm_limit, now))
        bucket.limit = key.user_feedback_rpm_limit
        self.users.move_to_end(user)
        if len(self.users) > NUM_USERS_MAX:
            self.users.popitem(last=False)
        return bucket


class KeyLimits(Protocol):
    """The limits of all keys, of this gateway or of several."""

    async def enter(self, key: KeySpec) -> Mapping[str, str]:
        """Admit one request and return the `x-ratelimit-*` headers; `leave` must follow.

        Raises:
            ApiError: 429, with when to come back.

        """
        ...

    async def leave(self, key: KeySpec, num_tokens: int) -> None:
        """End a request that `enter` admitted and charge its tokens."""
        ...

    async def admit_feedback(self, key: KeySpec, user: str, num_bytes: int) -> None:
        """Admit one piece of feedback on a request of a user, before it is stored.

        Raises:
            ApiError: 429, with when to come back.

        """
        ...


class OwnLimits:
    """Limits of a gateway that is the only one."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Args: `clock` gives seconds that never go back."""
        self._clock = clock
        self._accounts: dict[str, Account] = {}
        self._feedback: dict[str, FeedbackAccount] = {}

    async def enter(self, key: KeySpec) -> Mapping[str, str]:
        """See `KeyLimits.enter`."""
        now = self._clock()
        account = self._accounts.get(key.key_id) or Account(key, now)
        account = self._accounts.setdefault(key.key_id, account)
        account.enter(key, now)
        return account.headers(now)

    async def leave(self, key: KeySpec, num_tokens: int) -> None:
        """See `KeyLimits.leave`."""
        self._accounts[key.key_id].leave(num_tokens, self._clock())

    async def admit_feedback(self, key: KeySpec, user: str, num_bytes: int) -> None:
        """See `KeyLimits.admit_feedback`."""
        now = self._clock()
        account = self._feedback.get(key.key_id) or FeedbackAccount(key, now)
        self._feedback.setdefault(key.key_id, account).admit(key, user, num_bytes, now)


def _too_many(code: str, text: str, wait_s: float) -> ApiError:
    return ApiError(429, code, text, retry_after_s=wait_s)


class SharedLimits:
    """The limits of all keys over all gateways."""

    def __init__(self, ctx: Context, request_s_max: float) -> None:
        """Start with what the others have stored.

        Args:
            ctx: Of the gateway.
            request_s_max: Longest request, in seconds.

        """
        self._ctx = ctx
        self._request_s_max = request_s_max
        self._num_own: defaultdict[str, int] = defaultdict(int)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """By key: two requests of one key must not be each other's competitors."""

    async def enter(self, key: KeySpec) -> Mapping[str, str]:
        """See `KeyLimits.enter`."""
        account = Account(key, self._ctx.now())

        def admitted(before: LimitsChanged | None) -> LimitsChanged:
            nonlocal account
            account = self._account(key, before)
            account.enter(key, self._ctx.now())
            return self._changed(key, account, before, self._num_own[key.key_id] + 1)

        async with self._locks[key.key_id]:
            await self._ctx.change(LimitsChanged, key.key_id, admitted)
            self._num_own[key.key_id] += 1
        return account.headers(self._ctx.now())

    async def leave(self, key: KeySpec, num_tokens: int) -> None:
        """See `KeyLimits.leave`."""

        def left(before: LimitsChanged | None) -> LimitsChanged:
            account = self._account(key, before)
            account.leave(num_tokens, self._ctx.now())
            return self._changed(key, account, before, self._num_own[key.key_id])

        async with self._locks[key.key_id]:
            self._num_own[key.key_id] -= 1
            with contextlib.suppress(PenstockError):  # The user has the reply all the same.
                await self._ctx.change(LimitsChanged, key.key_id, left)

    async def admit_feedback(self, key: KeySpec, user: str, num_bytes: int) -> None:
        """See `KeyLimits.admit_feedback`."""
        name = f"{key.key_id}.feedback"

        def admitted(before: LimitsChanged | None) -> LimitsChanged:
            now = self._ctx.now()
            account = _feedback_account(key, before, now)
            account.admit(key, user, num_bytes, now)
            buckets = {"pieces": account.pieces, "kib": account.kib}
            buckets |= {f"user.{name}": bucket for name, bucket in account.users.items()}
            return LimitsChanged(name=name, at=now, levels=_levels(buckets, now))

        async with self._locks[name]:
            await self._ctx.change(LimitsChanged, name, admitted)

    def _account(self, key: KeySpec, before: LimitsChanged | None) -> Account:
        account = Account(key, self._ctx.now())
        if before is not None:
            _fill(account.requests, before, "requests")
            _fill(account.tokens, before, "tokens")
        elsewhere = sum(one.num for one in self._elsewhere(before).values())
        account.num_parallel = self._num_own[key.key_id] + elsewhere
        return account

    def _elsewhere(self, before: LimitsChanged | None) -> dict[str, RequestsOpen]:
        """Return what is in progress at others, but for requests that must be over."""
        since = self._ctx.now() - self._request_s_max
        found = before.open if before is not None else {}
        return {
            name: one for name, one in found.items() if name != self._ctx.actor and one.at >= since
        }

    def _changed(
        self, key: KeySpec, account: Account, before: LimitsChanged | None, num_own: int
    ) -> LimitsChanged:
        now = self._ctx.now()
        opened = self._elsewhere(before)
        if num_own:
            opened[self._ctx.actor] = RequestsOpen(num=num_own, at=now)
        buckets = {"requests": account.requests, "tokens": account.tokens}
        return LimitsChanged(name=key.key_id, at=now, levels=_levels(buckets, now), open=opened)


def _feedback_account(key: KeySpec, before: LimitsChanged | None, now: float) -> FeedbackAccount:
    account = FeedbackAccount(key, now)
    if before is not None:
        _fill(account.pieces, before, "pieces")
        _fill(account.kib, before, "kib")
        for name in before.levels:
            if name.startswith("user."):
                bucket = account.users[name.removeprefix("user.")] = Bucket(
                    key.user_feedback_rpm_limit, now
                )
                _fill(bucket, before, name)
    return account


def _fill(bucket: Bucket, before: LimitsChanged, name: str) -> None:
    level = before.levels.get(name)
    if level is not None:
        bucket.fill_to(level, before.at)


def _levels(buckets: Mapping[str, Bucket], now: float) -> dict[str, float]:
    """Return the levels of buckets that are not full: within a minute all are."""
    levels = {name: bucket.level(now) for name, bucket in buckets.items()}
    return {name: level for name, level in levels.items() if level < buckets[name].limit}
