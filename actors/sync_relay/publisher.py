"""The trainer's side: each version once into the origin store, whole only the first time."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.actors.runtime.snapshots import Snapshot
from penstock.actors.sync_relay.catalog import NOTHING, Catalog
from penstock.actors.sync_relay.image import Image
from penstock.actors.sync_relay.objects import (
    PREFIX,
    Origin,
    folder_key,
    pack_version,
    unpack_version,
)
from penstock.actors.sync_relay.transfer import (
    DamagedStoreError,
    Sleep,
    get_patiently,
    put_version,
    read_manifest,
)
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import (
    CorruptDataError,
    NotFoundError,
    PenstockError,
    PublishConflictError,
)
from penstock.messages.weights import SnapshotKind, WeightsPublished

Offload = Callable[..., Awaitable[Any]]
_log = logging.getLogger(__name__)


class StaleTokenError(PenstockError, PermissionError):
    """A newer publisher has taken over this run; this one must stop."""


class Publisher:
    """A `SnapshotPublisher` over an object store.

    The first publication claims a fencing token, one higher than any before; from then on a
    publisher with a lower one is refused. The base moves only once the manifest is durable.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        sleep: Sleep = asyncio.sleep,
        offload: Offload = asyncio.to_thread,
    ) -> None:
        """Prepare; nothing is read or claimed yet.

        Args:
            store: the origin.
            sleep: waits between attempts.
            offload: runs blocking work; a simulation's clock needs one without threads.

        """
        self._store = store
        self._sleep = sleep
        self._offload = offload
        self._token = 0
        self._base: Image | None = None
        self._base_version = NOTHING

    async def prepare(
        self, policy_version: int, snapshot: Snapshot, *, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        """Store one version; see `SnapshotPublisher.prepare`.

        Raises:
            StaleTokenError: another publisher took over.
            PublishConflictError: this version was prepared before, from other weights.
            DamagedStoreError: the store gives damaged objects, attempt after attempt.
            NotFoundError: the store holds no way to the version before this one.
            ValueError: the snapshot's tensors are not those of version 0.
            OSError: no room for the objects, after several attempts; the base has not moved.

        """
        await self._hold_token()
        image = await self._offload(Image.of, snapshot)
        stored = await self._stored(policy_version)
        if stored is None:
            stored = await self._store_version(policy_version, image, optimizer_step, config_json)
        elif (digest := image.digest()) != stored.target_root_digest:
            raise PublishConflictError(
                f"weights {policy_version}: prepared before with digest"
                f" {stored.target_root_digest}, now {digest}"
            )
        self._base, self._base_version = image, policy_version
        return stored

    async def _store_version(
        self, version: int, image: Image, optimizer_step: int, config_json: str
    ) -> WeightsPublished:
        base = None if version == 0 else await self._base_at(version - 1)
        if base is not None and base.table != image.table:
            raise ValueError(f"weights {version}: {_table_difference(base, image)}")
        origin = Origin(
            policy_version=version,
            base_version=version - 1,
            kind=SnapshotKind.ANCHOR if base is None else SnapshotKind.DELTA,
            optimizer_step=optimizer_step,
            fencing_token=self._token,
            config_json=config_json if base is None else "",
        )
        manifest, objects = await self._offload(pack_version, origin, base, image)
        await put_version(self._store, manifest, objects, self._sleep)
        return manifest

    async def _base_at(self, version: int) -> Image:
        """Return the image of a version: the one at hand, else read back from the store."""
        if self._base is not None and self._base_version == version:
            return self._base
        catalog = Catalog(self._store)
        await catalog.refresh()
        way = catalog.plan(NOTHING, version)
        if not way:
            raise NotFoundError(f"weights {version}: the store holds no way to this version")
        _log.info("reading weights %d back from the store, %d steps", version, len(way))
        image: Image | None = None
        for manifest in way:
            payloads = [
                await get_patiently(self._store, shard, self._sleep) for shard in manifest.shards
            ]
            try:
                image = await self._offload(unpack_version, image, manifest, payloads)
            except CorruptDataError as error:
                raise DamagedStoreError(str(error)) from error
        assert image is not None
        return image

    async def _stored(self, version: int) -> WeightsPublished | None:
        kind = SnapshotKind.ANCHOR if version == 0 else SnapshotKind.DELTA
        key = folder_key(version, kind, version - 1) + "manifest"
        if not await self._store.exists(key):
            return None
        try:
            return await read_manifest(self._store, key)
        except CorruptDataError as error:
            raise DamagedStoreError(str(error)) from error

    async def _hold_token(self) -> None:
        """Claim a token, or check that nobody claimed a higher one."""
        if self._token:
            if await self._store.exists(_token_key(self._token + 1)):
                raise StaleTokenError(
                    f"fencing token {self._token}: a newer publisher has taken over"
                )
            return
        nonce = secrets.token_bytes(16)
        taken = [int(key.rpartition("/")[2]) for key in await self._store.keys(_TOKENS)]
        token = max(taken, default=0) + 1
        try:
            await self._store.put(_token_key(token), nonce)
        except CorruptDataError as error:
            raise StaleTokenError(f"fencing token {token}: another publisher took it") from error
        self._token = token


_TOKENS = f"{PREFIX}token/"


def _token_key(token: int) -> str:
    return f"{_TOKENS}{token:08d}"


def _table_difference(base: Image, image: Image) -> str:
    old, new = set(base.table), set(image.table)
    names = sorted({spec.name for spec in old ^ new})
    return f"the tensors differ from the version before in {names[:5]} ({len(names)} in all)"
