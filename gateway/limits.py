"""Rate limits of a key: token buckets, and a bound on parallel requests. Pure; time is given.

Not aiolimiter: its bucket waits for capacity, but here a request is refused with the time until it
fits, a reply's tokens are charged afterwards and may be owed, and headers report what remains.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping

import msgspec

from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeySpec

MINUTE_S = 60.0
NUM_USERS_MAX = 10_000


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

    def spend(self, amount: float, now: float) -> None:
        """Take `amount` out."""
        self._refill(now)
        self._level -= amount

    def _refill(self, now: float) -> None:
        gained = max(0.0, now - self._at) * self.limit / MINUTE_S
        self._level = min(float(self.limit), self._level + gained)
        self._at = max(self._at, now)


class _Account(msgspec.Struct, kw_only=True):
    requests: Bucket
    tokens: Bucket
    feedback: Bucket
    feedback_kib: Bucket
    num_parallel: int = 0


class RateLimiter:
    """The accounts of all keys that have made a request."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._users: OrderedDict[tuple[str, str], Bucket] = OrderedDict()
        """Feedback by key and user; the one used longest ago goes first."""

    def enter(self, key: KeySpec, now: float) -> None:
        """Admit one chat request; `leave` must follow.

        Raises:
            ApiError: 429, with when to come back.

        """
        account = self._account(key, now)
        if account.num_parallel >= key.max_parallel_requests:
            text = f"{key.max_parallel_requests} requests of this key are in progress already"
            raise _too_many("too_many_parallel_requests", text, 1.0)
        wait_s = account.requests.wait_s(1.0, now)
        if wait_s > 0:
            text = f"the limit of {key.rpm_limit} requests per minute is reached"
            raise _too_many("rate_limit_exceeded", text, wait_s)
        wait_s = account.tokens.wait_s(1.0, now)
        if wait_s > 0:
            text = f"the limit of {key.tpm_limit} tokens per minute is reached"
            raise _too_many("rate_limit_exceeded", text, wait_s)
        account.requests.spend(1.0, now)
        account.num_parallel += 1

    def leave(self, key: KeySpec, num_tokens: int, now: float) -> None:
        """End a request that `enter` admitted and charge its tokens."""
        account = self._account(key, now)
        account.num_parallel -= 1
        account.tokens.spend(num_tokens, now)

    def admit_feedback(self, key: KeySpec, user: str, num_bytes: int, now: float) -> None:
        """Admit one piece of feedback on a request of a user, before it is stored.

        Raises:
            ApiError: 429, with when to come back; nothing is spent.

        """
        account, of_user = self._account(key, now), self._user(key, user, now)
        num_kib = num_bytes / 1024
        for bucket, amount, what in (
            (account.feedback, 1.0, f"{key.feedback_rpm_limit} pieces of feedback"),
            (account.feedback_kib, num_kib, f"{key.feedback_kib_limit} KiB of feedback"),
            (of_user, 1.0, f"{key.user_feedback_rpm_limit} pieces of feedback of one user"),
        ):
            wait_s = bucket.wait_s(amount, now)
            if wait_s > 0:
                text = f"the limit of {what} per minute is reached"
                raise _too_many("feedback_limit_exceeded", text, wait_s)
        account.feedback.spend(1.0, now)
        account.feedback_kib.spend(num_kib, now)
        of_user.spend(1.0, now)

    def headers(self, key: KeySpec, now: float) -> Mapping[str, str]:
        """Return the `x-ratelimit-*` headers."""
        account = self._account(key, now)
        values: dict[str, str] = {}
        for name, bucket in (("requests", account.requests), ("tokens", account.tokens)):
            values[f"x-ratelimit-limit-{name}"] = str(bucket.limit)
            values[f"x-ratelimit-remaining-{name}"] = str(bucket.remaining(now))
            values[f"x-ratelimit-reset-{name}"] = f"{bucket.reset_s(now):.3f}s"
        return values

    def _account(self, key: KeySpec, now: float) -> _Account:
        account = self._accounts.get(key.key_id)
        if account is None:
            account = _Account(
                requests=Bucket(key.rpm_limit, now),
                tokens=Bucket(key.tpm_limit, now),
                feedback=Bucket(key.feedback_rpm_limit, now),
                feedback_kib=Bucket(key.feedback_kib_limit, now),
            )
            self._accounts[key.key_id] = account
        account.requests.limit, account.tokens.limit = key.rpm_limit, key.tpm_limit
        account.feedback.limit = key.feedback_rpm_limit
        account.feedback_kib.limit = key.feedback_kib_limit
        return account

    def _user(self, key: KeySpec, user: str, now: float) -> Bucket:
        """Return a user's own bucket. A forgotten one is full again: its key's still bounds it."""
        name = (key.key_id, user)
        bucket = self._users.setdefault(name, Bucket(key.user_feedback_rpm_limit, now))
        bucket.limit = key.user_feedback_rpm_limit
        self._users.move_to_end(name)
        if len(self._users) > NUM_USERS_MAX:
            self._users.popitem(last=False)
        return bucket


def _too_many(code: str, text: str, wait_s: float) -> ApiError:
    return ApiError(429, code, text, retry_after_s=wait_s)
