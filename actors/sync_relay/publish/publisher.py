"""Publishes each version once into the origin store: a full snapshot first, then deltas.

```
 encode and upload every shard ─▶ manifest ─▶ head, swapped under the token ─▶ the base moves
                                                   └─ refused: a newer publisher has taken over
```
Here one process holds the whole snapshot; `multi_rank_publisher.py` is for one that many ranks
hold together.
"""

from collections.abc import Callable, Sequence

from penstock.actors.policy.snapshot import Snapshot
from penstock.actors.sync_relay.core.flat_snapshot import FlatSnapshot, Table, cut
from penstock.actors.sync_relay.core.objects import ManifestHeader
from penstock.actors.sync_relay.core.store_io import StoreIO
from penstock.actors.sync_relay.publish.history import History, check_same, read_back
from penstock.actors.sync_relay.publish.upload import store_version
from penstock.messages.weights import Extent, WeightsPublished

Cut = Callable[[Table], list[Extent]]


class Publisher:
    """A `SnapshotPublisher` over an object store.

    The first publication claims a fencing token, one higher than any before; from then on a
    publisher with a lower one is refused. The base moves only once a version is committed.
    """

    def __init__(self, io: StoreIO, *, cut_shards: Cut = cut) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            io: The origin.
            cut_shards: Cuts a tensor table into shards; receivers take any cut.

        """
        self._io = io
        self._cut = cut_shards
        self._history = History(io)
        self._newest: tuple[FlatSnapshot, WeightsPublished] | None = None

    async def prepare(
        self,
        policy_version: int,
        snapshot: Snapshot,
        *,
        optimizer_step: int,
        config_json: str,
        probe: Sequence[float] = (),
    ) -> WeightsPublished:
        """Store and commit one version; see `SnapshotPublisher.prepare`.

        Raises:
            StaleTokenError: Another publisher took over.
            PublishConflictError: This version was committed before, from other weights.
            DamagedStoreError: The store returns damaged objects, attempt after attempt.
            NotFoundError: The store holds no update path to the version before this one.
            ValueError: The snapshot's tensors are not those of version 0.
            OSError: No room for the objects, after several attempts; the base has not moved.

        """
        await self._history.head.hold()
        flat = await self._io.offload(FlatSnapshot.of, snapshot)
        manifest = await self._history.known(policy_version)
        if manifest is None:
            before = None if policy_version == 0 else await self._at(policy_version - 1)
            header = self._history.next_header(
                *(policy_version, before[1] if before else None, optimizer_step, config_json, probe)
            )
            manifest = await self._store_version(header, before[0] if before else None, flat)
        else:
            check_same(manifest, await self._io.offload(flat.digest))
        await self._history.commit(manifest)
        self._newest = flat, manifest
        return manifest

    async def _store_version(
        self, header: ManifestHeader, base: FlatSnapshot | None, flat: FlatSnapshot
    ) -> WeightsPublished:
        if base is not None and base.table != flat.table:
            difference = _table_difference(base.table, flat.table)
            raise ValueError(f"weights {header.policy_version}: {difference}")
        return await store_version(self._io, header, base, flat, self._cut(flat.table))

    async def _at(self, version: int) -> tuple[FlatSnapshot, WeightsPublished]:
        """Return a version: the newest one from memory, any other read back from the store."""
        if self._newest is not None and self._newest[1].policy_version == version:
            return self._newest
        return await read_back(self._io, version)


def _table_difference(old: Table, new: Table) -> str:
    names = sorted({spec.name for spec in set(old) ^ set(new)})
    return f"the tensors differ from the version before in {names[:5]} ({len(names)} in all)"
