"""Rate limits per key: token buckets and a bound on parallel requests, for one gateway or several.

Neither `limits` nor `aiolimiter` has a bucket that refuses with the time until a request fits and
that can be overdrawn (docs/decisions/libraries.md).

Several gateways share limits by compare-and-swap of `LimitsChanged` events:

```
 enter ──▶ check against the newest event ──▶ 429; nothing is stored
               ▲            └──▶ make the next event ──swap──▶ admitted
               └── another gateway was faster ◀──────────┘
```
A change takes one round trip to the event server, or three when another gateway was faster. A
gateway that is killed leaves its requests open; the others count them for `request_s_max`.
"""

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping
from typing import Protocol

from penstock.actors.runtime.context import Context
from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeySpec
from penstock.messages.errors import PenstockError
from penstock.messages.requests.gateways import LimitsChanged, RequestsOpen

log = logging.getLogger(__name__)

MINUTE_S = 60.0
CLOCK_WINDOW_S = 60.0
REFUSAL_S_MAX = 1.0
"""Maximum seconds for which a refusal is repeated without asking the event server."""
NUM_USERS_MAX = 10_000
"""Maximum users per key with a bucket of their own."""


class Bucket:
    """A token bucket that holds the allowance of one minute and refills evenly.

    The level may go below zero, because the cost of a reply is known only after it: it is charged
    in full, and later requests wait until the bucket has refilled.
    """

    def __init__(self, limit: int, now: float) -> None:
        self.limit = limit
        self._level = float(limit)
        self._at = now

    def remaining(self, now: float) -> int:
        """Return how much may be spent now; never negative."""
        self._refill(now)
        return max(0, math.floor(self._level))

    def reset_s(self, now: float) -> float:
        """Return the seconds until the bucket is full again."""
        self._refill(now)
        return (self.limit - self._level) * MINUTE_S / self.limit

    def wait_s(self, amount: float, now: float) -> float:
        """Return the seconds until `amount` may be spent; 0 if it may be spent now."""
        self._refill(now)
        # More than the bucket holds would never fit: a full bucket admits it.
        return max(0.0, (min(amount, self.limit) - self._level) * MINUTE_S / self.limit)

    def level(self, now: float) -> float:
        """Return the level; negative if overdrawn."""
        self._refill(now)
        return self._level

    def fill_to(self, level: float, at: float) -> None:
        """Set the level that the bucket had at time `at`."""
        self._level, self._at = level, at

    def spend(self, amount: float, now: float) -> None:
        """Take `amount` out of the bucket."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        # Shared limits use wall clocks of several hosts: time may seem to go backward.
        gained = max(0.0, now - self._at) * self.limit / MINUTE_S
        self._level = min(float(self.limit), self._level + gained)
        self._at = max(self._at, now)


class Account:
    """Remaining request allowance of one key."""

    def __init__(self, key: KeySpec, now: float) -> None:
        self.requests = Bucket(key.rpm_limit, now)
        self.tokens = Bucket(key.tpm_limit, now)
        self.num_parallel = 0

    def enter(self, key: KeySpec, now: float) -> None:
        """Admit one request; `leave` must follow.

        Raises:
            ApiError: 429 with the time to wait; nothing is spent.

        """
        # The keys file may have changed the limits since the last request.
        self.requests.limit, self.tokens.limit = key.rpm_limit, key.tpm_limit
        if self.num_parallel >= key.max_parallel_requests:
            text = f"{key.max_parallel_requests} requests of this key are in progress already"
            # When a request will end is unknown: 1 s is a guess.
            raise _too_many("too_many_parallel_requests", text, 1.0)
        # Both are checked before either is spent: a refusal must cost nothing.
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
    """Remaining feedback allowance of one key and of each of its users."""

    def __init__(self, key: KeySpec, now: float) -> None:
        self.pieces = Bucket(key.feedback_rpm_limit, now)
        self.kib = Bucket(key.feedback_kib_limit, now)
        self.retractions = Bucket(key.feedback_rpm_limit, now)
        """Of their own: who has used up the others can still take back what was sent."""
        self.users: OrderedDict[str, Bucket] = OrderedDict()
        """Buckets by user, least recently used first."""

    def charge(self, key: KeySpec, num_bytes: int, now: float) -> None:
        """Charge one piece of feedback before any work on it, also if it is refused then.

        Raises:
            ApiError: 429 with the time to wait; nothing is spent.

        """
        self.pieces.limit, self.kib.limit = key.feedback_rpm_limit, key.feedback_kib_limit
        _spend(
            (self.pieces, 1.0, f"{key.feedback_rpm_limit} pieces of feedback"),
            (self.kib, num_bytes / 1024, f"{key.feedback_kib_limit} KiB of feedback"),
            now=now,
        )

    def charge_user(self, key: KeySpec, user: str, now: float) -> None:
        """Charge one piece of feedback to its user; raises like `charge`."""
        what = f"{key.user_feedback_rpm_limit} pieces of feedback by one user"
        _spend((self._user(key, user, now), 1.0, what), now=now)

    def charge_retraction(self, key: KeySpec, now: float) -> None:
        """Charge one retraction; raises like `charge`."""
        self.retractions.limit = key.feedback_rpm_limit
        _spend((self.retractions, 1.0, f"{key.feedback_rpm_limit} retractions"), now=now)

    def _user(self, key: KeySpec, user: str, now: float) -> Bucket:
        """Return the bucket of one user."""
        bucket = self.users.setdefault(user, Bucket(key.user_feedback_rpm_limit, now))
        bucket.limit = key.user_feedback_rpm_limit
        self.users.move_to_end(user)
        # A dropped bucket comes back full: a key may invent users, but its own limit holds.
        if len(self.users) > NUM_USERS_MAX:
            self.users.popitem(last=False)
        return bucket


class KeyLimits(Protocol):
    """Limits of all keys, enforced by one gateway or shared by several."""

    async def enter(self, key: KeySpec) -> Mapping[str, str]:
        """Admit one request and return the `x-ratelimit-*` headers; `leave` must follow.

        Raises:
            ApiError: 429 with the time to wait.

        """
        ...

    async def leave(self, key: KeySpec, num_tokens: int) -> None:
        """End a request that `enter` admitted and charge its tokens."""
        ...

    async def charge_feedback(self, key: KeySpec, num_bytes: int) -> None:
        """Charge one piece of feedback before any work on it.

        Raises:
            ApiError: 429 with the time to wait.

        """
        ...

    async def charge_user(self, key: KeySpec, user: str) -> None:
        """Charge one piece of feedback to its user; raises like `charge_feedback`."""
        ...

    async def charge_retraction(self, key: KeySpec) -> None:
        """Charge one retraction before any work on it; raises like `charge_feedback`."""
        ...

    def note_time(self, stored_at: float) -> None:
        """Take in the event server's time of an event that has just arrived."""
        ...


class LocalLimits:
    """Limits of a single gateway, in memory."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Start with full limits; `clock` is monotonic, in seconds."""
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

    async def charge_feedback(self, key: KeySpec, num_bytes: int) -> None:
        """See `KeyLimits.charge_feedback`."""
        self._account(key).charge(key, num_bytes, self._clock())

    async def charge_user(self, key: KeySpec, user: str) -> None:
        """See `KeyLimits.charge_user`."""
        self._account(key).charge_user(key, user, self._clock())

    async def charge_retraction(self, key: KeySpec) -> None:
        """See `KeyLimits.charge_retraction`."""
        self._account(key).charge_retraction(key, self._clock())

    def note_time(self, stored_at: float) -> None:
        """See `KeyLimits.note_time`; one gateway goes by its own monotonic clock."""

    def _account(self, key: KeySpec) -> FeedbackAccount:
        account = self._feedback.get(key.key_id) or FeedbackAccount(key, self._clock())
        return self._feedback.setdefault(key.key_id, account)


def _spend(*charges: tuple[Bucket, float, str], now: float) -> None:
    """Take the amounts out of their buckets, or nothing if one of them does not suffice."""
    for bucket, amount, what in charges:
        wait_s = bucket.wait_s(amount, now)
        if wait_s > 0:
            text = f"the limit of {what} per minute is reached"
            raise _too_many("feedback_limit_exceeded", text, wait_s)
    for bucket, amount, _ in charges:
        bucket.spend(amount, now)


def _too_many(code: str, text: str, wait_s: float) -> ApiError:
    return ApiError(429, code, text, retry_after_s=wait_s)


class ServerClock:
    """The event server's clock, as far as its events show it: hosts' own clocks differ."""

    def __init__(self, ctx: Context) -> None:
        """Follow the host's own clock until the first event."""
        self._ctx = ctx
        self._ahead_s: float | None = None
        """Server's Unix time less the monotonic time."""
        self._next_s = -math.inf
        self._turned_at = ctx.monotonic()

    def note(self, stored_at: float) -> None:
        """Take in the time at which the server stored an event that has just arrived."""
        now = self._ctx.monotonic()
        # The smallest delay counts; of two windows, so that a clock that is set back is followed.
        self._next_s = max(self._next_s, stored_at - now)
        self._ahead_s = max(self._next_s, -math.inf if self._ahead_s is None else self._ahead_s)
        if now - self._turned_at >= CLOCK_WINDOW_S:
            self._turned_at, self._ahead_s, self._next_s = now, self._next_s, -math.inf

    def now(self) -> float:
        """Return the Unix time in seconds."""
        if self._ahead_s is None:
            return self._ctx.now()
        return self._ctx.monotonic() + self._ahead_s


class SharedLimits:
    """Limits that all gateways of a run enforce together, by the event server's clock."""

    def __init__(self, ctx: Context, request_s_max: float) -> None:
        """Start from what the other gateways have stored.

        Args:
            ctx: Context of the gateway.
            request_s_max: Maximum duration of a request in seconds.

        """
        self._ctx = ctx
        self._clock = ServerClock(ctx)
        self._refused: dict[str, tuple[float, ApiError]] = {}
        """Account -> when to ask the event server again, and what to say until then."""
        self._request_s_max = request_s_max
        self._num_own: defaultdict[str, int] = defaultdict(int)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Locks by key id: requests of one key at this gateway must not race in the swap."""

    async def enter(self, key: KeySpec) -> Mapping[str, str]:
        """See `KeyLimits.enter`."""
        account = Account(key, self._clock.now())

        # Called again after every lost swap: it starts over from the newer event.
        def admitted(before: LimitsChanged | None) -> LimitsChanged:
            nonlocal account
            account = self._account(key, before)
            account.enter(key, self._clock.now())
            return self._changed(key, account, before, self._num_own[key.key_id] + 1)

        async with self._locks[key.key_id]:
            self._check_refusal(key.key_id)
            with self._noting_refusal(key.key_id):
                await self._ctx.change(LimitsChanged, key.key_id, admitted)
            self._num_own[key.key_id] += 1
        return account.headers(self._clock.now())

    async def leave(self, key: KeySpec, num_tokens: int) -> None:
        """See `KeyLimits.leave`."""

        def left(before: LimitsChanged | None) -> LimitsChanged:
            account = self._account(key, before)
            account.leave(num_tokens, self._clock.now())
            return self._changed(key, account, before, self._num_own[key.key_id])

        async with self._locks[key.key_id]:
            self._num_own[key.key_id] -= 1
            # The user has the reply already: failing the request now would help nobody. The next
            # change for this key stores the right number of open requests.
            try:
                await self._ctx.change(LimitsChanged, key.key_id, left)
            except PenstockError as error:
                text = "key %s: %d tokens are not charged, the shared limits are not available: %s"
                log.warning(text, key.key_id, num_tokens, error)

    async def charge_feedback(self, key: KeySpec, num_bytes: int) -> None:
        """See `KeyLimits.charge_feedback`."""
        await self._charge(key, lambda account, now: account.charge(key, num_bytes, now))

    async def charge_user(self, key: KeySpec, user: str) -> None:
        """See `KeyLimits.charge_user`."""
        await self._charge(key, lambda account, now: account.charge_user(key, user, now))

    async def charge_retraction(self, key: KeySpec) -> None:
        """See `KeyLimits.charge_retraction`."""
        await self._charge(key, lambda account, now: account.charge_retraction(key, now))

    def note_time(self, stored_at: float) -> None:
        """See `KeyLimits.note_time`."""
        self._clock.note(stored_at)

    async def _charge(self, key: KeySpec, charge: Callable[[FeedbackAccount, float], None]) -> None:
        name = f"{key.key_id}.feedback"

        def charged(before: LimitsChanged | None) -> LimitsChanged:
            now = self._clock.now()
            account = _feedback_account(key, before, now)
            charge(account, now)
            buckets = {"pieces": account.pieces, "kib": account.kib}
            buckets["retractions"] = account.retractions
            buckets |= {f"user.{name}": bucket for name, bucket in account.users.items()}
            return LimitsChanged(name=name, at=now, levels=_levels(buckets, now))

        async with self._locks[name]:
            self._check_refusal(name)
            with self._noting_refusal(name):
                await self._ctx.change(LimitsChanged, name, charged)

    def _check_refusal(self, name: str) -> None:
        """Refuse an account without asking the event server, shortly after it refused.

        Raises:
            ApiError: 429.

        """
        until, error = self._refused.get(name, (0.0, None))
        if error is not None and self._ctx.monotonic() < until:
            raise error

    @contextlib.contextmanager
    def _noting_refusal(self, name: str) -> Generator[None, None, None]:
        self._refused.pop(name, None)
        try:
            yield
        except ApiError as error:
            wait_s = min(error.retry_after_s or 0.0, REFUSAL_S_MAX)
            self._refused[name] = (self._ctx.monotonic() + wait_s, error)
            raise

    def _account(self, key: KeySpec, before: LimitsChanged | None) -> Account:
        account = Account(key, self._clock.now())
        if before is not None:
            _fill(account.requests, before, "requests")
            _fill(account.tokens, before, "tokens")
        elsewhere = sum(requests.num for requests in self._elsewhere(before).values())
        account.num_parallel = self._num_own[key.key_id] + elsewhere
        return account

    def _elsewhere(self, before: LimitsChanged | None) -> dict[str, RequestsOpen]:
        """Return the requests in progress at other gateways, by gateway."""
        # A killed gateway never ends its requests: after the longest request they are over.
        since = self._clock.now() - self._request_s_max
        found = before.open if before is not None else {}
        return {
            name: requests
            for name, requests in found.items()
            if name != self._ctx.actor and requests.at >= since
        }

    def _changed(
        self, key: KeySpec, account: Account, before: LimitsChanged | None, num_own: int
    ) -> LimitsChanged:
        now = self._clock.now()
        opened = self._elsewhere(before)
        if num_own:
            opened[self._ctx.actor] = RequestsOpen(num=num_own, at=now)
        buckets = {"requests": account.requests, "tokens": account.tokens}
        return LimitsChanged(name=key.key_id, at=now, levels=_levels(buckets, now), open=opened)


def _feedback_account(key: KeySpec, before: LimitsChanged | None, now: float) -> FeedbackAccount:
    account = FeedbackAccount(key, now)
    if before is not None:
        _fill(account.retractions, before, "retractions")
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
    """Return the levels of all buckets that are not full, which bounds the size of the event."""
    levels = {name: bucket.level(now) for name, bucket in buckets.items()}
    return {name: level for name, level in levels.items() if level < buckets[name].limit}
