"""Creates manifests of new versions; separate from readers, as only publishers create any."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.actors.relay.core.digests import add_to_digest
from penstock.actors.relay.core.flat_snapshot import Table, table_digest
from penstock.actors.relay.core.objects import EncodedObject, ManifestHeader, representation
from penstock.messages.weights import ShardRef, WeightsPublished


def make_manifest(
    header: ManifestHeader,
    table: Table,
    root_digest: str,
    shards: Sequence[EncodedObject],
    digests: ShardRef,
) -> WeightsPublished:
    """Return the manifest of a version whose objects are stored."""
    change = sum(shard.change for shard in shards)
    num_elements: Counter[str] = Counter()
    for spec in table:
        num_elements[spec.dtype] += spec.size
    return WeightsPublished(
        **msgspec.structs.asdict(header),
        representation=representation(num_elements),
        target_root_digest=root_digest,
        target_element_digest=add_to_digest(header.base_element_digest, change),
        num_params=num_elements.total(),
        num_changed=sum(shard.num_changed for shard in shards),
        full_bytes=sum(spec.num_bytes for spec in table),
        shards=[shard.ref for shard in shards],
        tensor_table_digest=table_digest(table),
        digests=digests,
    )
