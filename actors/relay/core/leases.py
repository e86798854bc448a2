"""Leases, which protect versions that are being read; they are objects in the versions' store.

```
 leases/west-0/00000064-1700000120      replica west-0 needs version 64, until that unix second
```
A lease expires by itself, so that a reader that died does not keep versions forever.
"""

import contextlib
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager

from penstock.messages.bus import ObjectStore
from penstock.messages.errors import StoreFullError
from penstock.messages.weights import WeightsPublished

LEASES = "leases/"
LEASE_S = 300.0
"""Duration of a lease in seconds."""
_LEASE = re.compile(r".*/(\d{8,})-(\d{10,})")


async def leased_versions(store: ObjectStore, now: float) -> set[int]:
    """Return the versions under lease, and delete expired leases.

    Args:
        store: Store of the versions and leases.
        now: Current time, Unix seconds.

    """
    versions: set[int] = set()
    for key in await store.keys(LEASES):
        found = _LEASE.fullmatch(key)
        if found and int(found[2]) >= now:
            versions.add(int(found[1]))
        # Expired, or not a lease: both would stay forever, as their reader is gone.
        else:
            await store.delete(key)
    return versions


@contextlib.asynccontextmanager
async def leased(
    store: ObjectStore, holder: str, version: int, now: float, lease_s: float = LEASE_S
) -> AsyncGenerator[None, None]:
    """Protect a version, and the updates from it to newer ones, while the body runs.

    Args:
        store: Store of the version.
        holder: Name of the reader.
        version: Oldest version that is needed.
        now: Current time, Unix seconds.
        lease_s: Duration of the lease in seconds; a reader that takes longer needs another lease.

    """
    key = f"{LEASES}{holder}/{max(version, 0):08d}-{int(now + lease_s):010d}"
    # A full store must still be readable. Without a lease, a reader whose path is deleted under it
    # plans a new one.
    with contextlib.suppress(StoreFullError):
        await store.put(key, b"")
    try:
        yield
    finally:
        await store.delete(key)


def leased_path(
    store: ObjectStore, holder: str, path: Sequence[WeightsPublished], now: float
) -> AbstractAsyncContextManager[None]:
    """Protect the updates of a path while a reader applies them."""
    # A single update needs no lease: it is read long before retention deletes anything so new.
    if len(path) < 2:
        return contextlib.nullcontext()
    oldest = min(manifest.base_version for manifest in path if manifest.base_version >= 0)
    return leased(store, holder, oldest, now)
