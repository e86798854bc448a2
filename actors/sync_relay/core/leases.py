"""Leases: versions that someone still reads, as objects in the store that holds them.

```
 leases/west-0/00000064-1700000120      replica west-0 needs version 64, until that unix second
```
A lease that nobody renews ends by itself, so that one who died keeps nothing for ever.
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
        store: where versions and leases lie.
        now: unix seconds.

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

    A store without room for the lease gives none: who reads from it plans again when it must.

    Args:
        store: where the version lies.
        holder: who reads it.
        version: the oldest that is needed.
        now: unix seconds.
        lease_s: longest; what needs longer takes several leases.

    """
    key = f"{LEASES}{holder}/{max(version, 0):08d}-{int(now + lease_s):010d}"
    with contextlib.suppress(StoreFullError):
        await store.put(key, b"")
    try:
        yield
    finally:
        await store.delete(key)


def leased_way(
    store: ObjectStore, holder: str, way: Sequence[WeightsPublished], now: float
) -> AbstractAsyncContextManager[None]:
    """Keep a way while it is walked; a single step is over before anything is deleted."""
    if len(way) < 2:
        return contextlib.nullcontext()
    oldest = min(manifest.base_version for manifest in way if manifest.base_version >= 0)
    return leased(store, holder, oldest, now)
