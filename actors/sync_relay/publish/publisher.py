"""The trainer's side: each version once into the origin store, whole only the first time.

```
 encode and upload every shard ─▶ manifest ─▶ head, swapped under the token ─▶ the base moves
                                                   └─ refused: a newer publisher has taken over
```
Here one process holds the whole snapshot; `ranks.py` is for a snapshot that many hold together.
"""

import asyncio
from collections.abc import Callable

from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.sync_relay.core.flat_snapshot import Image, Table, cut
from penstock.actors.sync_relay.core.transfer import Sleep
from penstock.actors.sync_relay.publish.history import History, check_same, read_back
from penstock.actors.sync_relay.publish.shipping import Offload, store_version
from penstock.messages.bus import ObjectStore
from penstock.messages.weights import Extent, WeightsPublished

Cut = Callable[[Table], list[Extent]]


class Publisher:
    """A `SnapshotPublisher` over an object store.

    The first publication claims a fencing token, one higher than any before; from then on a
    publisher with a lower one is refused. The base moves only once a version is committed.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
        cut_shards: Cut = cut,
    ) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            store: the origin.
            sleep: waits between attempts.
            offload: runs blocking work; a simulation's clock needs one without threads.
            cut_shards: cuts a tensor table into shards; receivers take any cut.

        """
        self._store = store
        self._sleep = sleep
        self._offload = offload
        self._cut = cut_shards
        self._history = History(store, sleep)
        self._newest: tuple[Image, WeightsPublished] | None = None

    async def prepare(
        self, policy_version: int, snapshot: Snapshot, *, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        """Store and commit one version; see `SnapshotPublisher.prepare`.

        Raises:
            StaleTokenError: another publisher took over.
            PublishConflictError: this version was committed before, from other weights.
            DamagedStoreError: the store gives damaged objects, attempt after attempt.
            NotFoundError: the store holds no way to the version before this one.
            ValueError: the snapshot's tensors are not those of version 0.
            OSError: no room for the objects, after several attempts; the base has not moved.

        """
        await self._history.head.hold()
        image = await self._offload(Image.of, snapshot)
        manifest = await self._history.known(policy_version)
        if manifest is None:
            manifest = await self._store_version(policy_version, image, optimizer_step, config_json)
        else:
            check_same(manifest, await self._offload(image.digest))
        await self._history.commit(manifest)
        self._newest = image, manifest
        return manifest

    async def _store_version(
        self, version: int, image: Image, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        base, before = (None, None) if version == 0 else await self._at(version - 1)
        if base is not None and base.table != image.table:
            raise ValueError(f"weights {version}: {_table_difference(base.table, image.table)}")
        origin = self._history.next_origin(version, before, optimizer_step, config_json)
        return await store_version(
            self._store, origin, base, image, self._cut(image.table), self._sleep, self._offload
        )

    async def _at(self, version: int) -> tuple[Image, WeightsPublished]:
        """Return the image of a version: the one at hand, else read back from the store."""
        if self._newest is not None and self._newest[1].policy_version == version:
            return self._newest
        return await read_back(self._store, version, self._sleep, self._offload)


def _table_difference(old: Table, new: Table) -> str:
    names = sorted({spec.name for spec in set(old) ^ set(new)})
    return f"the tensors differ from the version before in {names[:5]} ({len(names)} in all)"
