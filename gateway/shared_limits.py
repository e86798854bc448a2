"""Limits that several gateways hold together, by compare-and-swap of `LimitsChanged` events.

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
from collections import defaultdict
from collections.abc import Mapping

from penstock.actors.runtime.context import Context
from penstock.gateway.keys import KeySpec
from penstock.gateway.limits import Account, Bucket, FeedbackAccount
from penstock.messages.errors import PenstockError
from penstock.messages.gateways import LimitsChanged, RequestsOpen


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
