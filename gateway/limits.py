"""Rate limits of a key: token buckets, and a bound on parallel requests. Pure; time is given.

Not aiolimiter: its bucket waits for capacity, but here a request is refused with the time until it
fits, a reply's tokens are charged afterwards and may be owed, and headers report what remains.
"""

import math
from collections.abc import Mapping

import msgspec

from penstock.gateway.errors import ApiError
from penstock.gateway.keys import KeySpec

MINUTE_S = 60.0


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
    num_parallel: int = 0


class RateLimiter:
    """The accounts of all keys that have made a request."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}

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
                requests=Bucket(key.rpm_limit, now), tokens=Bucket(key.tpm_limit, now)
            )
            self._accounts[key.key_id] = account
        return account


def _too_many(code: str, text: str, wait_s: float) -> ApiError:
    return ApiError(429, code, text, retry_after_s=wait_s)
