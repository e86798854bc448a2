"""What a delta changes: by tensor, layer, expert, kind of tensor, codec and exponent.

The tables of the file say nearly all of it. How many elements each exponent has, and so which share
of them changed, only the base knows.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable

import msgspec
import numpy as np

from penstock.infra.weights.diff import joined, ordered_map, read_base
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import Manifest, TargetRow, TensorRow
from penstock.infra.weights.files.tensors import Weights
from penstock.infra.weights.patched import Patched
from penstock.kernels import delta
from penstock.kernels.delta.dtypes import exponent_keys

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Share(msgspec.Struct, frozen=True):
    """How much of a group of tensors changed."""

    num_words: int
    num_changed: int

    @property
    def fraction(self) -> float:
        """Return the changed share."""
        return self.num_changed / max(1, self.num_words)


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, or the plain bytes of one file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    status: str
    """equal, changed, reshaped, added, replaced (another dtype or size), removed."""
    share: Share

    @property
    def layer(self) -> str | None:
        """Return the number of its layer."""
        return _found(_LAYER, self.name)

    @property
    def expert(self) -> str | None:
        """Return the number of its expert."""
        return _found(_EXPERT, self.name)

    @property
    def kind(self) -> str:
        """Return its name without the numbers."""
        return _NUMBER.sub("*", self.name)


class CodecUse(msgspec.Struct, frozen=True):
    """Use of one codec."""

    num_extents: int
    num_words: int
    num_bytes: int


class Inspection(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of a delta."""

    num_bytes: int
    target_bytes: int
    digest: str
    tensors: tuple[TensorChange, ...]
    files: tuple[TensorChange, ...]
    codecs: dict[str, CodecUse]
    exponents: dict[str, dict[int, Share]]
    """Changes by dtype and exponent field; empty without the base."""
    exponent_classes: dict[str, dict[int, int]]
    """Changed words by dtype and by the first exponent of the class that they were coded in."""

    def grouped(self, group: Callable[[TensorChange], str | None]) -> dict[str, Share]:
        """Add up the tensors that are there, by `group`."""
        totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for tensor in self.tensors:
            label = group(tensor)
            if label is not None and tensor.status != "removed":
                totals[label][0] += tensor.share.num_words
                totals[label][1] += tensor.share.num_changed
        return {label: Share(*total) for label, total in totals.items()}


def inspect(patch: DeltaFile, base: Weights | None, *, num_threads: int) -> Inspection:
    """Read a delta; with its base, also every change.

    Raises:
        CorruptDataError: a damaged delta, or another base.

    """
    manifest = patch.manifest
    base_rows = manifest.base_rows()
    changes = [_change(base_rows.get(row.key), row) for row in manifest.target]
    target_keys = {row.key for row in manifest.target}
    removed = [
        TensorChange(name=r.name, dtype=r.dtype, shape=r.shape, status="removed", share=Share(0, 0))
        for r in manifest.base
        if r.key not in target_keys and not r.is_plain_bytes
    ]
    is_bytes = [row.is_plain_bytes for row in manifest.target]
    return Inspection(
        num_bytes=patch.num_bytes,
        target_bytes=sum(row.num_bytes for row in manifest.target),
        digest=patch.digest,
        tensors=(*(c for c, b in zip(changes, is_bytes, strict=True) if not b), *removed),
        files=tuple(c for c, b in zip(changes, is_bytes, strict=True) if b),
        codecs=_codecs(manifest),
        exponents={} if base is None else _exponents(patch, base, num_threads),
        exponent_classes=_exponent_classes(patch),
    )


def _change(base: TensorRow | None, row: TargetRow) -> TensorChange:
    status = "changed" if row.num_changed else "equal"
    if base is None:
        status = "added"
    elif not base.is_base_of(row):
        status = "replaced"
    elif base.shape != row.shape:
        status = "reshaped"
    share = Share(row.num_words, row.num_changed)
    return TensorChange(name=row.name, dtype=row.dtype, shape=row.shape, status=status, share=share)


def _codecs(manifest: Manifest) -> dict[str, CodecUse]:
    uses: dict[str, CodecUse] = {}
    for extent in manifest.extents:
        use = uses.get(extent.codec, CodecUse(0, 0, 0))
        uses[extent.codec] = CodecUse(
            use.num_extents + 1, use.num_words + extent.num_words, use.num_bytes + extent.num_bytes
        )
    return uses


def _exponent_classes(patch: DeltaFile) -> dict[str, dict[int, int]]:
    changed: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for number, extent in enumerate(patch.manifest.extents):
        if extent.codec == delta.Codec.CLASS_GAP_ULP.name.lower():
            for record in delta.read_header(patch.payload(number)).classes:
                dtype = patch.manifest.target[extent.row].dtype
                changed[dtype][record.first_key] += record.num_changed
    return {dtype: dict(sorted(counts.items())) for dtype, counts in changed.items()}


def _exponents(patch: DeltaFile, base: Weights, num_threads: int) -> dict[str, dict[int, Share]]:
    manifest = patch.manifest
    view = Patched(base, patch, num_kept=0)

    def counted(number: int) -> tuple[str, np.ndarray] | None:
        pieces, words = view.extent(number)
        rows = [manifest.target[piece.row] for piece in pieces]
        own = base.tensors.get(rows[0].key)
        if own is None or not own.is_base_of(rows[0]):
            return None
        old = joined([read_base(base, r, p) for r, p in zip(rows, pieces, strict=True)])
        dtype = rows[0].element_type.dtype
        if dtype.traits.num_keys == 1:
            return None
        keys = exponent_keys(old, dtype)
        pair = [np.bincount(k, minlength=256) for k in (keys, keys[old != words])]
        return rows[0].dtype, np.stack(pair)

    totals: dict[str, np.ndarray] = {}
    for found in ordered_map(counted, range(len(manifest.extents)), num_threads):
        if found is not None:
            dtype, counts = found
            totals[dtype] = totals.get(dtype, 0) + counts
    return {
        dtype: {int(e): Share(int(n[e]), int(k[e])) for e in np.flatnonzero(n)}
        for dtype, (n, k) in totals.items()
    }


def _found(pattern: re.Pattern[str], name: str) -> str | None:
    match = pattern.search(name)
    return match.group(1) if match else None
