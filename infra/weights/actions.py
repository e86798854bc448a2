"""What each action of `penstock weights` does with its arguments."""

import argparse
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from penstock.infra.weights.apply import apply_delta
from penstock.infra.weights.diff import DeltaSummary, write_delta
from penstock.infra.weights.files.checkpoint import CheckpointFiles
from penstock.infra.weights.files.delta_file import DeltaFile, is_delta
from penstock.infra.weights.files.paths import printable, require_apart
from penstock.infra.weights.files.tensors import Weights
from penstock.infra.weights.patched import merge_deltas
from penstock.infra.weights.verify import verify
from penstock.messages.errors import ConfigError


@contextmanager
def progress_bar(label: str, num_bytes: int) -> Generator[Callable[[int], None]]:
    """Yield a function to call with the bytes done since its last call."""
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
            " deltas: places of changes are ranks among its elements"
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
        f"{arguments.output}: {written:,} bytes, every digest as it should be")  # fmt: skip
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
    figures = msgspec.to_builtins(summary) | {
        "output": str(arguments.output),
        "ratio": summary.ratio,
    }
    share = summary.num_changed / max(1, summary.num_words)
    say(arguments, figures,
        f"{arguments.output}: {summary.num_bytes:,} bytes for {summary.target_bytes:,}"
        f" ({summary.ratio:.1f}x smaller), {share:.3%} changed")  # fmt: skip
    return 0


def say(arguments: argparse.Namespace, figures: dict[str, object], text: str) -> None:
    """Print figures as one line of JSON with --json, else the text."""
    line = msgspec.json.encode(figures).decode() if arguments.json else text
    sys.stdout.write(line + "\n")


def num_bytes(weights: Weights) -> int:
    """Return the size of a checkpoint."""
    return sum(tensor.num_bytes for tensor in weights.tensors.values())


ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "diff": _diff,
    "apply": _apply,
    "merge": _merge,
    "verify": _verify,
    "inspect": _inspect,
}
