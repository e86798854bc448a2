"""Object store in a bucket of S3 or a compatible service; needs the extra `s3`.

Credentials come from the environment (`AWS_ACCESS_KEY_ID` and so on), never from the configuration
of a run. Conditional puts (`If-None-Match: *`) make sure that an object is written only once.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from penstock.infra.stores.keys import check_key
from penstock.messages.errors import (
    ConfigError,
    CorruptDataError,
    NotFoundError,
    StoreFullError,
    StoreUnreachableError,
)
from penstock.messages.retries import RetryPolicy, with_retries

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config
    from obstore.store import S3Store as Bucket

_FULL = ("status code: 507", "StorageFull", "QuotaExceeded")
"""Error texts of servers that have no space left."""
_DETAILS = "Debug source"
"""Marker in error texts after which internal details of the library follow."""
PATIENCE_S = 60.0
"""Longest time in seconds that an operation is retried while the server is unreachable."""
_PATIENCE_S_MIN = 10.0
"""Deadline of a single attempt, without retries."""
_PAUSE_S = 0.5
_NO_RETRY: "RetryConfig" = {"max_retries": 0}
"""Retries of the library, disabled: it repeats no conditional puts, so this module retries."""
_REFUSAL = re.compile(r"status code: 4(?!08|29)")
"""HTTP status in an error text for which a retry is pointless."""
log = logging.getLogger(__name__)
R = TypeVar("R")


class S3Store:
    """An `ObjectStore`: key `a/b/c` is the object `prefix/a/b/c` of one bucket."""

    def __init__(
        self, bucket: "Bucket", where: str, prefix: str = "", *, patience_s: float = PATIENCE_S
    ) -> None:
        """Wrap an open bucket, named `where` in errors; callers normally use `open`."""
        self._bucket = bucket
        self._where = where
        self._patience_s = patience_s
        self._prefix = f"{prefix}/" if prefix else ""

    @classmethod
    def open(
        cls, bucket: str, *, prefix: str = "", endpoint: str = "", patience_s: float = PATIENCE_S
    ) -> "S3Store":
        """Open an existing bucket without contacting the server yet.

        Args:
            bucket: Name of the bucket.
            prefix: Prefix of every key.
            endpoint: URL of a server other than Amazon S3, such as `http://minio:9000`.
            patience_s: Seconds to retry while the server is unreachable; 0: give up soon.

        Raises:
            ConfigError: The extra `s3` is not installed.

        """
        try:
            from obstore.store import S3Store as Bucket
        except ImportError as error:
            text = "store.kind s3: install the extra: pip install -e '.[s3]'"
            raise ConfigError(text) from error
        config: S3Config = {"bucket": bucket}
        if endpoint:
            config["endpoint"] = endpoint
        options: ClientConfig = {
            "timeout": f"{max(patience_s, _PATIENCE_S_MIN):g}s",
            "allow_http": endpoint.startswith("http:"),
        }
        made = Bucket(config=config, client_options=options, retry_config=_NO_RETRY)
        where = f"s3 bucket {bucket!r} at {endpoint or 'Amazon S3'}"
        return cls(made, where, prefix, patience_s=patience_s)

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store the object unless it exists; see `ObjectStore.put`."""
        from obstore.exceptions import AlreadyExistsError

        path, held = self._path(key), bytes(data)
        try:
            await self._with_retries(
                key,
                lambda: self._bucket.put_async(path, held, mode="create", use_multipart=False),
            )
        except AlreadyExistsError as error:
            # It may be our own earlier attempt whose answer was lost: equal bytes are fine.
            if await self.get(key) != held:
                raise CorruptDataError(
                    f"object {key!r} already exists with different bytes"
                ) from error
        except FileNotFoundError as error:
            raise self._translated(key, error) from error

    async def get(self, key: str) -> bytes:
        """Read the whole object; see `ObjectStore.get`."""
        path = self._path(key)

        async def read() -> bytes:
            return bytes(await (await self._bucket.get_async(path)).bytes_async())

        try:
            return await self._with_retries(key, read)
        except FileNotFoundError as error:
            raise NotFoundError(f"object {key!r} is not in the bucket") from error

    async def exists(self, key: str) -> bool:
        """Return whether the object is there."""
        path = self._path(key)
        try:
            await self._with_retries(key, lambda: self._bucket.head_async(path))
        except FileNotFoundError:
            return False
        return True

    async def delete(self, key: str) -> None:
        """Remove the object if it exists."""
        path = self._path(key)
        with suppress(FileNotFoundError):
            await self._with_retries(key, lambda: self._bucket.delete_async(path))

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted."""
        # The library lists whole folders only; keys are filtered by prefix below.
        folder = (self._prefix + prefix).rpartition("/")[0]

        async def read() -> list[str]:
            found: list[str] = []
            async for batch in self._bucket.list(folder or None):  # pyright: ignore[reportUnknownMemberType]
                found += [meta["path"].removeprefix(self._prefix) for meta in batch]
            return found

        found = await self._with_retries(prefix, read)
        return sorted(key for key in found if key.startswith(prefix))

    async def _with_retries(self, key: str, act: Callable[[], Awaitable[R]]) -> R:
        """Run an operation, and retry it until the deadline while the server is unreachable.

        Raises:
            StoreUnreachableError: The server does not answer, or refuses; the text names bucket
                and endpoint.
            StoreFullError: The server has no space left.

        """
        deadline_s = max(self._patience_s, _PATIENCE_S_MIN)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._until_answered(key, act)
        except TimeoutError as error:
            text = f"object {key!r}: {self._where}: no answer in {deadline_s:g} s"
            raise StoreUnreachableError(text) from error

    async def _until_answered(self, key: str, act: Callable[[], Awaitable[R]]) -> R:
        from obstore.exceptions import AlreadyExistsError, BaseError, GenericError

        async def attempt() -> R:
            try:
                return await act()
            except (AlreadyExistsError, FileNotFoundError):
                raise
            except BaseError as error:
                raise self._translated(key, error) from error

        def is_final(error: Exception) -> bool:
            cause = error.__cause__
            return not isinstance(cause, GenericError) or _REFUSAL.search(str(cause)) is not None

        retry = RetryPolicy(pause_s=_PAUSE_S, deadline_s=self._patience_s)
        return await with_retries(
            attempt, retry, retry_on=(StoreUnreachableError,), is_final=is_final, log=log
        )

    def probe(self) -> None:
        """List one page of keys synchronously, to check that the bucket answers.

        Raises:
            StoreUnreachableError: The server does not answer, or refuses.

        """
        self._probe(self._prefix, lambda: self._bucket.list_with_delimiter(self._prefix))  # pyright: ignore[reportUnknownMemberType]

    def probe_put(self, key: str) -> None:
        """Check that the server refuses to overwrite a small object; raises like `probe`."""
        from obstore.exceptions import AlreadyExistsError, BaseError

        try:
            self._bucket.put(self._path(key), b"penstock", mode="create", use_multipart=False)
            self._bucket.put(self._path(key), b"other", mode="create", use_multipart=False)
        except AlreadyExistsError:
            return
        except (BaseError, FileNotFoundError) as error:
            raise self._translated(key, error) from error
        text = "the server overwrites objects: expected conditional puts (If-None-Match)"
        raise StoreUnreachableError(f"object {key!r}: {self._where}: {text}")

    def probe_get(self, key: str) -> None:
        """Read the object of `probe_put`; raises like `probe`."""
        self._probe(key, lambda: self._bucket.get(self._path(key)).bytes())

    def probe_delete(self, key: str) -> None:
        """Delete the object of `probe_put`; raises like `probe`."""
        self._probe(key, lambda: self._bucket.delete(self._path(key)))

    def _probe(self, key: str, act: Callable[[], object]) -> None:
        from obstore.exceptions import BaseError

        try:
            act()
        except (BaseError, FileNotFoundError) as error:
            raise self._translated(key, error) from error

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _translated(self, key: str, error: Exception) -> Exception:
        text = f"object {key!r}: {self._where}: {str(error).partition(_DETAILS)[0].strip()}"
        is_full = any(word in str(error) for word in _FULL)
        return StoreFullError(text) if is_full else StoreUnreachableError(text)
