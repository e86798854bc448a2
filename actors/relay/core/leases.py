"""Leases: versions that are still being read, as objects in the store that holds them.

```
 leases/west-0/00000064-1700000120      replica west-0 needs version 64, until that unix second
```
A lease ends by itself unless it is renewed, so that a reader that died keeps nothing for ever.
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
_LEASE = re.compile(r".*/(\d{8,})-(\d{10,})")


async def leased_versions(store: ObjectStore, now: float) -> set[int]:
    """Return the versions under lease; leases that ended are deleted.

    Args:
        store: The store of versions and leases.
        now: Unix seconds.

    """
    versions: set[int] = set()
    for key in await store.keys(LEASES):
        found = _LEASE.fullmatch(key)
        if found and int(found[2]) >= now:
            versions.add(int(found[1]))
        else:
            await store.delete(key)
    return versions


@contextlib.asynccontextmanager
async def leased(
    store: ObjectStore, holder: str, version: int, now: float, lease_s: float = LEASE_S
) -> AsyncGenerator[None, None]:
    """Keep a version, and what leads from it to newer ones, while the body runs.

    A store without room for the lease grants none: its reader plans again if it must.

    Args:
        store: The store of the version.
        holder: Name of the reader.
        version: The oldest that is needed.
        now: Unix seconds.
        lease_s: Longest duration; what needs longer takes several leases.

    """
    key = f"{LEASES}{holder}/{max(version, 0):08d}-{int(now + lease_s):010d}"
    with contextlib.suppress(StoreFullError):
        await store.put(key, b"")
    try:
        yield
    finally:
        await store.delete(key)


def leased_path(
    store: ObjectStore, holder: str, path: Sequence[WeightsPublished], now: float
) -> AbstractAsyncContextManager[None]:
    """Keep an update path while it is taken; a single step is over before anything is deleted."""
    if len(path) < 2:
        return contextlib.nullcontext()
    oldest = min(manifest.base_version for manifest in path if manifest.base_version >= 0)
    return leased(store, holder, oldest, now)
