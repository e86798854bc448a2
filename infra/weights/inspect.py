"""`penstock weights inspect`: an inspection as tables, as JSON, as a picture."""

import argparse
import sys
from collections.abc import Callable
from contextlib import ExitStack

import msgspec
from rich.console import Console
from rich.table import Table

from penstock.infra.commands.output import print_result
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.delta_file import DeltaFile
from penstock.infra.weights.files.output import new_file
from penstock.infra.weights.files.paths import printable, require_apart
from penstock.infra.weights.inspection import Inspection, Share, TensorChange, inspect
from penstock.infra.weights.plot import draw

_GROUPS: dict[str, Callable[[TensorChange], str | None]] = {
    "kind": lambda tensor: tensor.kind,
    "layer": lambda tensor: tensor.layer,
    "expert": lambda tensor: tensor.expert,
}
_ROWS_MAX = 20
_PIPE_COLUMNS = 160
_BAR_CHARACTERS = 24


def inspect_delta(arguments: argparse.Namespace) -> int:
    """Show what a delta changes."""
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
        print_result(_figures(found), as_json=True)
    else:
        _print(found, is_whole=arguments.all)
    return 0


def _figures(found: Inspection) -> dict[str, object]:
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
