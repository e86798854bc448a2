"""A progress bar on standard error, where somebody watches."""

import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def progress_bar(label: str, num_bytes: int) -> Generator[Callable[[int], None]]:
    """Give a function that is called with the bytes done since its last call."""
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
