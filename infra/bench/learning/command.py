"""`penstock bench learning [--only PART ...] [--json] -o DIR`: whole runs, resumable."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.infra.bench.learning.parts import (
    PARTS,
    UnitFailedError,
    finish,
    open_part,
    read_results,
)
from penstock.messages.errors import ConfigError


def bench_learning(output: Path | None, only: Sequence[str]) -> dict[str, Any]:
    """Finish the named parts, or all, and return the figures of every finished part.

    Args:
        output: Folder of results; what is finished there does not run again.
        only: Names of parts; none: all.

    Raises:
        ConfigError: No folder, or no such part.
        UnitFailedError: Some units failed; the others are finished.

    """
    if output is None:
        raise ConfigError("bench learning: expected -o DIR, the folder of its results")
    if unknown := sorted(set(only) - set(PARTS)):
        raise ConfigError(f"bench --only: expected some of {', '.join(PARTS)}, got {unknown}")
    output = output.resolve()
    failures: list[str] = []
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
            figures[name] = part.summarize(results)
    return figures
