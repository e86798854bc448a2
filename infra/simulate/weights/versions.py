"""Manifests and objects of versions that exist as sizes alone."""

from collections.abc import Mapping, Sequence

from blake3 import blake3

from penstock.actors.sync_relay.core.objects import folder_key
from penstock.actors.sync_relay.region.retention import UpdateEdge
from penstock.infra.simulate.weights.sized_store import SizedBytes
from penstock.messages.weights import ShardRef, WeightsPublished


def make_version(
    edge: UpdateEdge, sizes: Sequence[int], *, full_bytes: int, fencing_token: int
) -> tuple[WeightsPublished, Mapping[str, bytes]]:
    """Return the manifest and the objects, by key, of one version.

    Args:
        edge: version, kind and base.
        sizes: of its objects, in bytes.
        full_bytes: of the whole snapshot.
        fencing_token: of its publisher.

    """
    folder = folder_key(edge.policy_version, edge.kind, edge.base_version)
    objects: dict[str, bytes] = {}
    shards: list[ShardRef] = []
    for number, num_bytes in enumerate(sizes):
        content = f"{folder}{number}".encode()
        check = blake3(content).hexdigest()
        key = f"{folder}{number}-{check[:16]}"
        objects[key] = SizedBytes(content, num_bytes)
        shards.append(
            ShardRef(
                shard_id=number, object_key=key, num_bytes=num_bytes, blake3=check, codec="sized"
            )
        )
    manifest = WeightsPublished(
        policy_version=edge.policy_version,
        base_version=edge.base_version,
        kind=edge.kind,
        optimizer_step=edge.policy_version,
        fencing_token=fencing_token,
        representation="bf16",
        base_root_digest=_digest(edge.base_version),
        target_root_digest=_digest(edge.policy_version),
        num_params=full_bytes // 2,
        num_changed=0,
        full_bytes=full_bytes,
        shards=shards,
    )
    return manifest, objects


def _digest(version: int) -> str:
    return f"{version:032x}" if version >= 0 else ""
