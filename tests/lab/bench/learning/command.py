"""Whole runs, resumable: `python -m tests.lab learning [--only PART ...] [--json] -o DIR`."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.lab.bench.learning.parts import (
    PARTS,
    BenchPart,
    Result,
    UnitFailedError,
    alone,
    finish,
    open_part,
    read_results,
)

from penstock.messages.errors import ConfigError, CorruptDataError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `learning`."""
    text = "folder of its results; what is finished there does not run again"
    parser.add_argument("-o", "--output", type=Path, metavar="DIR", help=text)
    text = "parts to run (default: all)"
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help=text)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Finish the chosen parts and return the figures of all finished ones."""
    return bench_learning(arguments.output, arguments.only)


def bench_learning(output: Path | None, only: Sequence[str]) -> dict[str, Any]:
    """Finish the named parts, or all, and return the figures of every finished part.

    Args:
        output: Folder of results; what is finished there does not run again.
        only: Names of parts; none: all.

    Raises:
        ConfigError: No folder, no such part, or another process is at work in the folder.
        CorruptDataError: A unit's file is not what its part writes.
        UnitFailedError: Some units failed; the others are finished.

    """
    if output is None:
        raise ConfigError("learning: expected -o DIR, the folder of its results")
    if unknown := sorted(set(only) - set(PARTS)):
        raise ConfigError(f"learning --only: expected some of {', '.join(PARTS)}, got {unknown}")
    output = output.resolve()
    failures: list[str] = []
    with alone(output):
        for name in only or PARTS:
            failures += finish(name, open_part(name), output / name)
    if failures:
        lines = "\n".join(failures)
        raise UnitFailedError(f"{len(failures)} units failed; run it again to retry:\n{lines}")
    figures: dict[str, Any] = {}
    for name in PARTS:
        part = open_part(name)
        results = read_results(part, output / name)
        if results is not None:
            figures[name] = _figures(name, part, results, output / name)
    return figures


def _figures(
    name: str, part: BenchPart, results: Mapping[str, Result], folder: Path
) -> dict[str, Any]:
    """Return a part's figures of results that may have been made or changed by anyone."""
    try:
        return part.summarize(results)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        text = f"{folder}: results that {name} cannot be summed up from, {type(error).__name__}"
        text = f"{text}: {error}; delete the unit's file that is wrong, and its unit runs again"
        raise CorruptDataError(text) from error
