"""`penstock weights inspect`: summarizes a delta as tables, as JSON or as an SVG picture.

It shows the changes by tensor, layer, expert, kind of tensor, codec and exponent. The manifest has
nearly all of it; only the shares per exponent need the base.
"""

import argparse
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from html import escape

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.infra.output import print_result
from penstock.infra.weights.diff import joined, ordered_map, read_base
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.manifest import Manifest, TargetRow, TensorRow
from penstock.infra.weights.files.output import new_file
from penstock.infra.weights.files.paths import printable, require_apart
from penstock.infra.weights.files.tensors import Weights
from penstock.infra.weights.patched import PatchedWeights
from penstock.kernels import delta
from penstock.kernels.delta.dtypes import exponent_keys

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EXPERT = re.compile(r"(?:^|\.)experts\.(\d+)\.")
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


class Share(msgspec.Struct, frozen=True):
    """Changed share of a group of tensors."""

    num_words: int
    num_changed: int

    @property
    def fraction(self) -> float:
        """Changed share of the words."""
        return self.num_changed / max(1, self.num_words)


class TensorChange(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor, or the plain bytes of one file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    status: str
    """One of equal, changed, reshaped, added, replaced (another dtype or size), removed."""
    share: Share

    @property
    def layer(self) -> str | None:
        """Number of the layer in the name."""
        return _found(_LAYER, self.name)

    @property
    def expert(self) -> str | None:
        """Number of the expert in the name."""
        return _found(_EXPERT, self.name)

    @property
    def kind(self) -> str:
        """Name with `*` in place of numbers."""
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
    """Changed words by dtype and first exponent of their coding class."""

    def grouped(self, group: Callable[[TensorChange], str | None]) -> dict[str, Share]:
        """Return the share of each group of present tensors."""
        totals: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
        for tensor in self.tensors:
            label = group(tensor)
            if label is not None and tensor.status != "removed":
                totals[label][0] += tensor.share.num_words
                totals[label][1] += tensor.share.num_changed
        return {label: Share(*total) for label, total in totals.items()}


def inspect(patch: DeltaFile, base: Weights | None, *, num_threads: int) -> Inspection:
    """Inspect a delta; with its base, also the exponents of every change.

    Raises:
        CorruptDataError: The delta is damaged, or has another base.

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
    view = PatchedWeights(base, patch, num_kept=0)

    def counted(number: int) -> tuple[str, np.ndarray] | None:
        pieces, words = view.extent(number)
        rows = [manifest.target[piece.row] for piece in pieces]
        own = base.tensors.get(rows[0].key)
        if own is None or not own.is_base_of(rows[0]):
            return None
        old = joined([read_base(base, r, p) for r, p in zip(rows, pieces, strict=True)])
        dtype = rows[0].element_type.dtype
        # Integers have no exponents.
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


_CELL_PX = 18
_LABEL_PX = 330
_WIDTH_MIN_PX = 720
_BAR_PX = 120
_WITH_BASE = ("equal", "changed", "reshaped")
_TEXT = 'font-family="system-ui, sans-serif" font-size="12" fill="#222"'
_LIGHT, _DARK = (235, 243, 250), (8, 48, 107)


def draw(found: Inspection) -> str:
    """Return an SVG of the changed share by kind of tensor and layer, and by base exponent."""
    heat, heat_width, heat_height = _heatmap(found)
    bars, bars_width, bars_height = _plot_exponents(found)
    width = max(_WIDTH_MIN_PX, heat_width, bars_width) + 20
    height = heat_height + bars_height + 70
    title = (
        f"{found.num_bytes:,} bytes for {found.target_bytes:,}"
        f" ({found.target_bytes / found.num_bytes:.1f}x smaller)"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
        f' viewBox="0 0 {width} {height}"><rect width="100%" height="100%" fill="#fff"/>'
        f'<text x="10" y="24" {_TEXT} font-weight="bold">{title}</text>'
        f'<g transform="translate(10 50)">{heat}</g>'
        f'<g transform="translate(10 {60 + heat_height})">{bars}</g></svg>\n'
    )


def _heatmap(found: Inspection) -> tuple[str, int, int]:
    """Return (SVG, width, height) with a row per kind of tensor and a column per layer."""
    cells = found.grouped(
        lambda t: f"{t.kind}\n{t.layer or ''}" if t.status in _WITH_BASE else None
    )
    kinds = sorted({label.rpartition("\n")[0] for label in cells})
    layers = sorted({label.rpartition("\n")[2] for label in cells}, key=lambda n: (len(n), n))
    highest = max((share.fraction for share in cells.values()), default=0.0) or 1.0
    parts = [_text(0, 0, f"Changed share by kind and layer (darkest: {highest:.2%})")]
    for x, layer in enumerate(layers):
        if x % max(1, len(layers) // 16) == 0:
            parts.append(_text(_LABEL_PX + x * _CELL_PX, 18, layer or "–"))
    for y, kind in enumerate(kinds):
        parts.append(_text(0, 24 + (y + 0.7) * _CELL_PX, kind[-48:]))
        for x, layer in enumerate(layers):
            share = cells.get(f"{kind}\n{layer}")
            if share is not None:
                left, top = _LABEL_PX + x * _CELL_PX, 24 + y * _CELL_PX
                label = f"{kind} {layer}: {share.fraction:.3%}"
                color = _color(share.fraction / highest)
                parts.append(_rect(left, top, (_CELL_PX - 1, _CELL_PX - 1), color, label))
    return "".join(parts), _LABEL_PX + len(layers) * _CELL_PX, 40 + len(kinds) * _CELL_PX


def _plot_exponents(found: Inspection) -> tuple[str, int, int]:
    """Return (SVG, width, height) with bars by exponent, or by exponent class without the base."""
    charts = [
        _bars(f"Changed share by base exponent, {dtype}", _labeled(shares))
        for dtype, shares in found.exponents.items()
    ]
    for dtype, counts in () if charts else found.exponent_classes.items():
        total = sum(counts.values())
        shares = {first: Share(total, n) for first, n in counts.items()}
        title = f"Share of all changes by class of base exponents (from), {dtype}"
        charts.append(_bars(title, _labeled(shares)))
    parts: list[str] = []
    height = 0
    for chart, _ in charts:
        parts.append(f'<g transform="translate(0 {height})">{chart}</g>')
        height += _BAR_PX + 60
    return "".join(parts), max((width for _, width in charts), default=0), height


def _labeled(shares: dict[int, Share]) -> list[tuple[str, float]]:
    return [(str(label), share.fraction) for label, share in sorted(shares.items())]


def _bars(title: str, values: list[tuple[str, float]]) -> tuple[str, int]:
    highest = max(value for _, value in values) or 1.0
    parts = [_text(0, 0, f"{title} (highest: {highest:.2%})")]
    step = max(2, len(values) // 20)
    for number, (label, value) in enumerate(values):
        height = round(_BAR_PX * value / highest, 1)
        size = (_CELL_PX - 3, height)
        left = number * _CELL_PX
        parts.append(_rect(left, 12 + _BAR_PX - height, size, "#2171b5", f"{label}: {value:.3%}"))
        if number % step == 0:
            parts.append(_text(left, _BAR_PX + 28, label))
    baseline = _rect(0, 12 + _BAR_PX, (len(values) * _CELL_PX, 1), "#888", "0")
    return "".join(parts) + baseline, len(values) * _CELL_PX


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y:.1f}" {_TEXT}>{escape(printable(text))}</text>'


def _rect(x: float, y: float, size: tuple[float, float], color: str, label: str) -> str:
    return (
        f'<rect x="{x}" y="{y:.1f}" width="{size[0]}" height="{size[1]}" fill="{color}">'
        f"<title>{escape(printable(label))}</title></rect>"
    )


def _color(share: float) -> str:
    red, green, blue = (
        round(low + (high - low) * share) for low, high in zip(_LIGHT, _DARK, strict=True)
    )
    return f"#{red:02x}{green:02x}{blue:02x}"


_GROUPS: dict[str, Callable[[TensorChange], str | None]] = {
    "kind": lambda tensor: tensor.kind,
    "layer": lambda tensor: tensor.layer,
    "expert": lambda tensor: tensor.expert,
}
_ROWS_MAX = 20
_PIPE_COLUMNS = 160
_BAR_CHARACTERS = 24


def inspect_delta(arguments: argparse.Namespace) -> int:
    """Show the changes of a delta."""
    with ExitStack() as stack:
        patch = stack.enter_context(DeltaFile(arguments.delta))
        base = stack.enter_context(CheckpointFiles(arguments.base)) if arguments.base else None
        found = inspect(patch, base, num_threads=arguments.threads)
    if arguments.plot:
        inputs = (arguments.delta, *filter(None, (arguments.base,)))
        require_apart(arguments.plot, inputs)
        with new_file(arguments.plot) as file:
            file.write(draw(found).encode())
    if arguments.json:
        print_result(_as_dict(found), as_json=True)
    else:
        _print(found, is_whole=arguments.all)
    return 0


def _as_dict(found: Inspection) -> dict[str, object]:
    return msgspec.to_builtins(found, str_keys=True) | {
        "ratio": found.target_bytes / found.num_bytes,
        "groups": {
            name: msgspec.to_builtins(found.grouped(group)) for name, group in _GROUPS.items()
        },
    }


def _print(found: Inspection, *, is_whole: bool) -> None:
    console = Console(
        width=None if sys.stdout.isatty() else _PIPE_COLUMNS,
        highlight=False,
        markup=False,
        emoji=False,
    )
    words = sum(t.share.num_words for t in found.tensors)
    changed = sum(t.share.num_changed for t in found.tensors)
    console.print(
        f"{found.num_bytes:,} bytes for {found.target_bytes:,}"
        f" ({found.target_bytes / found.num_bytes:.1f}x smaller);"
        f" {changed:,} of {words:,} words changed ({changed / max(1, words):.3%})"
    )
    console.print(f"digest {found.digest}")
    console.print(_codec_table(found))
    for title, group in _GROUPS.items():
        if shares := found.grouped(group):
            console.print(_share_table(title, shares))
    for dtype, shares in found.exponents.items():
        named = {str(exponent): share for exponent, share in shares.items()}
        console.print(_share_table(f"base exponent, {dtype}", named))
    if not found.exponents:
        for dtype, counts in found.exponent_classes.items():
            console.print(_class_table(dtype, counts))
    rows = [t for t in (*found.tensors, *found.files) if is_whole or t.status != "equal"]
    rows.sort(key=lambda t: -t.share.num_changed)
    console.print(_tensor_table(rows if is_whole else rows[:_ROWS_MAX]))
    if len(rows) > _ROWS_MAX and not is_whole:
        console.print(f"{len(rows) - _ROWS_MAX} more changed; --all lists every tensor")


def _share_table(title: str, shares: dict[str, Share]) -> Table:
    table = _table(title, "words", "changed", "share")
    table.add_column("")
    highest = max(share.fraction for share in shares.values()) or 1.0
    for label in sorted(shares, key=_natural):
        share = shares[label]
        bar = "█" * round(_BAR_CHARACTERS * share.fraction / highest)
        table.add_row(printable(label), *_cells(share), bar)
    return table


def _codec_table(found: Inspection) -> Table:
    table = _table("codec", "extents", "words", "bytes")
    for name, use in sorted(found.codecs.items()):
        table.add_row(name, f"{use.num_extents:,}", f"{use.num_words:,}", f"{use.num_bytes:,}")
    return table


def _class_table(dtype: str, counts: dict[int, int]) -> Table:
    table = _table(f"class of base exponents from, {dtype}", "changed")
    for first, changed in counts.items():
        table.add_row(str(first), f"{changed:,}")
    return table


def _tensor_table(rows: list[TensorChange]) -> Table:
    table = _table("tensor or file", "words", "changed", "share")
    for header in ("dtype", "shape", "status"):
        table.add_column(header)
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "0-d"
        table.add_row(printable(row.name), *_cells(row.share), row.dtype, shape, row.status)
    return table


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", title_justify="left")
    table.add_column(first, overflow="fold")
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _cells(share: Share) -> tuple[str, str, str]:
    return f"{share.num_words:,}", f"{share.num_changed:,}", f"{share.fraction:.3%}"


def _natural(label: str) -> tuple[int, str]:
    return (len(label), label) if label.isdecimal() else (0, label)
