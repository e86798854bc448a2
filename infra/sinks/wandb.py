"""Weights & Biases, offline: a folder that `wandb sync` uploads, and no connection before that.

The library appends to no folder that it finished, so each start writes the folder again, from the
log's beginning: what a killed sink left is not continued, and no point is there twice.
"""

import asyncio
import importlib
import shutil
from collections.abc import Sequence
from typing import Any

from penstock.infra.sinks.rows import Row
from penstock.infra.sinks.sink import SinkSettings
from penstock.infra.sinks.traces import TraceSpan
from penstock.messages.base import Stream

_library: Any = importlib.import_module("wandb")
STEP = "policy_version"
"""The horizontal axis: events of older versions follow those of newer ones."""


class WandbSink:
    """One offline run of W&B, under the run's own id."""

    def __init__(self, settings: SinkSettings) -> None:
        shutil.rmtree(settings.folder / "wandb", ignore_errors=True)
        self._run: Any = _library.init(
            mode="offline",
            project="penstock",
            id=settings.run_id.replace(":", "-"),  # Which W&B refuses.
            name=settings.run_id,
            dir=str(settings.folder),
            settings=_library.Settings(
                console="off",
                silent=True,
                disable_git=True,
                save_code=False,
                x_disable_stats=True,
                x_disable_meta=True,
            ),
        )
        self._run.define_metric("*", step_metric=STEP)
        self._after: dict[Stream, int] = {}

    @property
    def after(self) -> dict[Stream, int]:
        """See `Sink.after`."""
        return self._after

    async def write(
        self, rows: Sequence[Row], spans: Sequence[TraceSpan], after: dict[Stream, int]
    ) -> None:
        """See `Sink.write`."""
        await asyncio.to_thread(self._write, rows)
        self._after = after

    def _write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({**row.values, STEP: row.step, "_timestamp": row.at})

    async def close(self) -> None:
        """See `Sink.close`."""
        await asyncio.to_thread(self._run.finish)
        await asyncio.to_thread(_library.teardown)  # Its process writes on after `finish`.
