"""Objects in a bucket of S3 or whatever speaks its protocol; needs the extra `s3`.

Credentials come from the environment (`AWS_ACCESS_KEY_ID` and so on), never from a run's
configuration. That an object is written once rests on conditional puts (`If-None-Match: *`).
"""

from datetime import timedelta
from typing import TYPE_CHECKING

from penstock.infra.stores.keys import check_key
from penstock.messages.errors import (
    ConfigError,
    CorruptDataError,
    NotFoundError,
    StoreFullError,
    StoreUnreachableError,
)

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config
    from obstore.store import S3Store as Bucket

_FULL = ("507", "StorageFull", "QuotaExceeded")
"""How servers say it."""
_DETAILS = "Debug source"
"""From here on, an error's text is of the library's insides."""
_ATTEMPT_S = "60s"
_RETRY: "RetryConfig" = {"max_retries": 5, "retry_timeout": timedelta(seconds=60)}
"""Below that, callers try again themselves."""
_NO_RETRY: "RetryConfig" = {"max_retries": 0}
_CHECK_S = "10s"


class S3Store:
    """An `ObjectStore`: key `a/b/c` is the object `prefix/a/b/c` of one bucket."""

    def __init__(self, bucket: "Bucket", prefix: str = "") -> None:
        """Use `open` but for a bucket with settings of its own."""
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""

    @classmethod
    def open(
        cls, bucket: str, *, prefix: str = "", endpoint: str = "", is_patient: bool = True
    ) -> "S3Store":
        """Open a bucket that exists; nothing is sent yet.

        Args:
            bucket: its name.
            prefix: goes before every key.
            endpoint: of a server other than Amazon's, e.g. `http://minio:9000`.
            is_patient: try again what failed; otherwise give up within seconds.

        Raises:
            ConfigError: the extra `s3` is not installed.

        """
        try:
            from obstore.store import S3Store as Bucket
        except ImportError as error:
            text = "store.kind s3: install the extra: pip install 'penstock[s3]'"
            raise ConfigError(text) from error
        config: S3Config = {"bucket": bucket}
        if endpoint:
            config["endpoint"] = endpoint
        options: ClientConfig = {
            "timeout": _ATTEMPT_S if is_patient else _CHECK_S,
            "allow_http": endpoint.startswith("http:"),
        }
        retry = _RETRY if is_patient else _NO_RETRY
        return cls(Bucket(config=config, client_options=options, retry_config=retry), prefix)

    async def put(self, key: str, data: bytes | memoryview) -> None:
        """Store unless it is there; see `ObjectStore.put`."""
        from obstore.exceptions import AlreadyExistsError, BaseError

        path = self._path(key)
        try:
            await self._bucket.put_async(path, bytes(data), mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if await self.get(key) != data:
                raise CorruptDataError(f"object {key!r} is there with other bytes") from error
        except BaseError as error:
            raise _translated(key, error) from error

    async def get(self, key: str) -> bytes:
        """Read the whole object; see `ObjectStore.get`."""
        from obstore.exceptions import BaseError

        try:
            found = await self._bucket.get_async(self._path(key))
            return bytes(await found.bytes_async())
        except FileNotFoundError as error:
            raise NotFoundError(f"object {key!r} is not in the bucket") from error
        except BaseError as error:
            raise _translated(key, error) from error

    async def exists(self, key: str) -> bool:
        """Tell whether the object is there."""
        from obstore.exceptions import BaseError

        try:
            await self._bucket.head_async(self._path(key))
        except FileNotFoundError:
            return False
        except BaseError as error:
            raise _translated(key, error) from error
        return True

    async def delete(self, key: str) -> None:
        """Remove it; absent is fine."""
        from obstore.exceptions import BaseError

        try:
            await self._bucket.delete_async(self._path(key))
        except FileNotFoundError:
            return
        except BaseError as error:
            raise _translated(key, error) from error

    async def keys(self, prefix: str) -> list[str]:
        """List keys that start with `prefix`, sorted."""
        from obstore.exceptions import BaseError

        folder = (self._prefix + prefix).rpartition("/")[0]  # The library lists whole folders.
        found: list[str] = []
        try:
            async for batch in self._bucket.list(folder or None):  # pyright: ignore[reportUnknownMemberType]
                found += [meta["path"].removeprefix(self._prefix) for meta in batch]
        except BaseError as error:
            raise _translated(prefix, error) from error
        return sorted(key for key in found if key.startswith(prefix))

    def probe(self) -> None:
        """Ask for one page of keys and wait for it, without a thread that outlasts the call.

        Raises:
            StoreUnreachableError: no answer, or a refusal.

        """
        from obstore.exceptions import BaseError

        try:
            self._bucket.list_with_delimiter(self._prefix)  # pyright: ignore[reportUnknownMemberType]
        except BaseError as error:
            raise _translated(self._prefix, error) from error

    def _path(self, key: str) -> str:
        return self._prefix + check_key(key)


def _translated(key: str, error: Exception) -> Exception:
    text = f"object {key!r}: {str(error).partition(_DETAILS)[0].strip()}"
    is_full = any(word in str(error) for word in _FULL)
    return StoreFullError(text) if is_full else StoreUnreachableError(text)
