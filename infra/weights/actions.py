"""The actions of `penstock weights`.

`apply` writes the target of a delta, byte for byte. It checks every extent before writing it and
every tensor's digest at the end; only then does the output get its name.
"""

import argparse
import os
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from penstock.infra.output import write_to
from penstock.infra.weights.diff import Advance, DeltaSummary, hash_whole, ordered_map, write_delta
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.delta_file import DeltaFile, is_delta
from penstock.infra.weights.files.manifest import Manifest, TensorRow, TensorSlice
from penstock.infra.weights.files.output import new_file, new_folder
from penstock.infra.weights.files.paths import printable, require_apart
from penstock.infra.weights.files.tensors import Tensor, Weights
from penstock.infra.weights.patched import PatchedWeights, merge_deltas
from penstock.messages.errors import ConfigError, CorruptDataError


class VerifyResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint relates to a delta."""

    is_base: bool
    is_target: bool
    differs_from_base: tuple[str, ...]
    """Names of tensors and files that are missing, new or different."""
    differs_from_target: tuple[str, ...]


def verify(
    weights: Weights, patch: DeltaFile, *, num_threads: int, advance: Advance
) -> VerifyResult:
    """Read the whole delta and checkpoint, and compare every digest.

    Raises:
        CorruptDataError: The delta is damaged.

    """
    # Reading a payload verifies it.
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


OUTPUT_SLACK_BYTES, OUTPUT_RATIO_MAX = 64 << 20, 64
"""A target may have 64 MiB plus 64 times the bytes of base and delta."""
Places = list[tuple[int, int]]
"""File descriptor and offset of the first byte, by row of the target table."""


def apply_delta(
    base: Weights, patch: DeltaFile, output: Path, *, num_threads: int, advance: Advance
) -> int:
    """Write the target of a delta; return its size in bytes.

    Args:
        output: A file, or a new or empty folder, like the target.
        advance: Function that is called with the bytes written.

    Raises:
        CorruptDataError: The base is wrong or the delta damaged; `output` is unchanged.
        ConfigError: `output` exists, or is of the wrong kind.
        OSError: Writing failed, e.g. because the disk is full; nothing is left behind.

    """
    manifest = patch.manifest
    _check_size(base, patch)
    view = PatchedWeights(base, patch, num_kept=0)
    hashers = [row.hasher() for row in manifest.target]
    # One more than threads: a finished extent waits for its turn to be written.
    rooms = _rooms(manifest, num_threads + 1)

    def decoded(number: int) -> tuple[list[TensorSlice], np.ndarray, np.ndarray]:
        room = rooms.get_nowait()
        return *view.extent(number, room), room

    with _outputs(manifest, output) as places:
        numbers = range(len(manifest.extents))
        for pieces, words, room in ordered_map(decoded, numbers, num_threads):
            begin = 0
            for piece in pieces:
                part = words[begin : begin + piece.num_words]
                begin += piece.num_words
                hashers[piece.row].update(part)
                _write(places[piece.row], piece, part.data.cast("B"), part.itemsize)
            advance(words.nbytes)
            rooms.put(room)
        for row, hasher in zip(manifest.target, hashers, strict=True):
            if hasher.digest() != row.digest:
                raise CorruptDataError(f"{patch.path}: {row.name!r} has another digest")
    return sum(row.num_bytes for row in manifest.target)


def _check_size(base: Weights, patch: DeltaFile) -> None:
    # A delta of a few kilobytes could otherwise fill a disk with zeros.
    input_bytes = patch.num_bytes + sum(tensor.num_bytes for tensor in base.tensors.values())
    target_bytes = sum(row.num_bytes for row in patch.manifest.target)
    if target_bytes > OUTPUT_SLACK_BYTES + OUTPUT_RATIO_MAX * input_bytes:
        raise CorruptDataError(
            f"{patch.path}: base and delta have {input_bytes:,} bytes, its target {target_bytes:,}:"
            " no checkpoint grows like that"
        )


def _rooms(manifest: Manifest, count: int) -> SimpleQueue[np.ndarray]:
    """Return buffers for the extents that are decoded at once, which are reused."""
    num_bytes = max(
        (e.num_words * manifest.target[e.row].element_type.word_bytes for e in manifest.extents),
        default=0,
    )
    rooms: SimpleQueue[np.ndarray] = SimpleQueue()
    for _ in range(count):
        rooms.put(np.empty(num_bytes, np.uint8))
    return rooms


@contextmanager
def _outputs(manifest: Manifest, output: Path) -> Generator[Places]:
    # At full size from the beginning: a disk that is too small fails before any work.
    places: Places = [(-1, 0)] * len(manifest.target)
    with ExitStack() as stack:
        root = stack.enter_context(new_folder(output)) if manifest.is_folder else None
        for file in manifest.files:
            descriptor = stack.enter_context(_open(root, file.path, output))
            offset = 0
            for number in file.rows:
                places[number] = (descriptor, offset)
                offset += manifest.target[number].num_bytes
            if offset:
                os.posix_fallocate(descriptor, 0, offset)
        yield places


@contextmanager
def _open(root: Path | None, path: str, output: Path) -> Generator[int]:
    if root is None:
        with new_file(output) as file:
            yield file.fileno()
        return
    place = root / path
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.open("xb") as file:
        yield file.fileno()
        os.fsync(file.fileno())


def _write(place: tuple[int, int], piece: TensorSlice, data: memoryview, word_bytes: int) -> None:
    descriptor, offset = place
    offset += piece.first_word * word_bytes
    # A write may be partial, e.g. at 2 GiB.
    while data:
        count = os.pwrite(descriptor, data, offset)
        data, offset = data[count:], offset + count


@contextmanager
def progress_bar(label: str, num_bytes: int) -> Generator[Callable[[int], None]]:
    """Show a progress bar; yield a function to call with the bytes done since its last call."""
    columns = (
        "{task.description}",
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(label, total=num_bytes)
        yield lambda done: progress.advance(task, done)


_NAMED_MAX = 10


def _diff(arguments: argparse.Namespace) -> int:
    # Before anything is opened: an output inside of an input would become part of it.
    require_apart(arguments.output, (arguments.base, arguments.next))
    with (
        CheckpointFiles(arguments.base) as base,
        CheckpointFiles(arguments.next) as target,
        progress_bar("diff", num_bytes(target)) as advance,
    ):
        summary = write_delta(
            base, target, arguments.output, num_threads=arguments.threads, advance=advance
        )
    return _say_summary(arguments, summary)


def _merge(arguments: argparse.Namespace) -> int:
    if arguments.base.is_file() and is_delta(arguments.base):
        raise ConfigError(
            f"merge: expected BASE, the checkpoint that {arguments.base} applies to, before the"
            " deltas"
        )
    require_apart(arguments.output, (arguments.base, *arguments.deltas))
    with CheckpointFiles(arguments.base) as base, progress_bar("merge", num_bytes(base)) as advance:
        summary = merge_deltas(
            base,
            arguments.deltas,
            arguments.output,
            num_threads=arguments.threads,
            advance=advance,
        )
    return _say_summary(arguments, summary)


def _apply(arguments: argparse.Namespace) -> int:
    folders = (arguments.base,) if arguments.base.is_dir() else ()
    require_apart(arguments.output, (arguments.delta, *folders))
    with CheckpointFiles(arguments.base) as base, DeltaFile(arguments.delta) as patch:
        total = sum(row.num_bytes for row in patch.manifest.target)
        with progress_bar("apply", total) as advance:
            written = apply_delta(
                base, patch, arguments.output, num_threads=arguments.threads, advance=advance
            )
    say(arguments, {"output": str(arguments.output), "num_bytes": written},
        f"{arguments.output}: {written:,} bytes, all digests are right")  # fmt: skip
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    with (
        CheckpointFiles(arguments.checkpoint) as weights,
        DeltaFile(arguments.delta) as patch,
        progress_bar("verify", num_bytes(weights)) as advance,
    ):
        verdict = verify(weights, patch, num_threads=arguments.threads, advance=advance)
    differing = min(verdict.differs_from_base, verdict.differs_from_target, key=len)
    roles = [
        role for role, is_so in (("base", verdict.is_base), ("target", verdict.is_target)) if is_so
    ]
    text = f"{arguments.checkpoint}: " + (
        f"the {' and the '.join(roles)} of this delta"
        if roles
        else f"neither base nor target of this delta; {len(differing)} tensors or files differ:"
        f" {', '.join(map(printable, differing[:_NAMED_MAX]))}"
    )
    say(arguments, msgspec.to_builtins(verdict), text)
    return 0 if roles else 1


def _inspect(arguments: argparse.Namespace) -> int:
    from penstock.infra.weights.inspect import inspect_delta

    return inspect_delta(arguments)


def _say_summary(arguments: argparse.Namespace, summary: DeltaSummary) -> int:
    fields = msgspec.to_builtins(summary) | {
        "output": str(arguments.output),
        "ratio": summary.ratio,
    }
    share = summary.num_changed / max(1, summary.num_words)
    say(arguments, fields,
        f"{arguments.output}: {summary.num_bytes:,} bytes for {summary.target_bytes:,}"
        f" ({summary.ratio:.1f}x smaller), {share:.3%} changed")  # fmt: skip
    return 0


def say(arguments: argparse.Namespace, fields: dict[str, object], text: str) -> None:
    """Print the fields as one line of JSON with --json, otherwise the text."""
    line = msgspec.json.encode(fields).decode() if arguments.json else text
    write_to(sys.stdout, line + "\n")


def num_bytes(weights: Weights) -> int:
    """Return the size of a checkpoint in bytes."""
    return sum(tensor.num_bytes for tensor in weights.tensors.values())


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "diff": _diff,
    "apply": _apply,
    "merge": _merge,
    "verify": _verify,
    "inspect": _inspect,
}
