"""What a checkpoint is to a delta: its base, its target or neither; and if the delta is sound."""

import msgspec

from penstock.infra.weights.diff import Advance, hash_whole, ordered_map
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import TensorRow
from penstock.infra.weights.files.tensors import Tensor, Weights


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint relates to a delta."""

    is_base: bool
    is_target: bool
    differs_from_base: tuple[str, ...]
    """Names of tensors and files that are missing, new or have other bytes."""
    differs_from_target: tuple[str, ...]


def verify(
    weights: Weights, patch: DeltaFile, *, num_threads: int, advance: Advance
) -> VerifyResult:
    """Read the delta and the checkpoint whole, and compare every digest.

    Raises:
        CorruptDataError: the delta is damaged.

    """
    for _ in ordered_map(patch.payload, range(len(patch.manifest.extents)), num_threads):
        pass

    def hashed(tensor: Tensor) -> TensorRow:
        hasher = tensor.hasher()
        hash_whole(weights, tensor, hasher)
        return TensorRow(tensor.name, tensor.dtype, tensor.shape, hasher.digest())

    found: set[TensorRow] = set()
    for row in ordered_map(hashed, list(weights.tensors.values()), num_threads):
        found.add(row)
        advance(row.num_bytes)
    from_base = _differing(found, set(patch.manifest.base))
    target = {TensorRow(r.name, r.dtype, r.shape, r.digest) for r in patch.manifest.target}
    from_target = _differing(found, target)
    return VerifyResult(
        is_base=not from_base,
        is_target=not from_target,
        differs_from_base=from_base,
        differs_from_target=from_target,
    )


def _differing(found: set[TensorRow], expected: set[TensorRow]) -> tuple[str, ...]:
    return tuple(sorted({row.name for row in found ^ expected}))
