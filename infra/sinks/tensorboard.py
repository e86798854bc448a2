"""TensorBoard: one event file per run, a pure function of the log up to the cursor."""

import asyncio
import importlib
import os
from collections.abc import Sequence
from typing import Any

from penstock.infra.sinks.rows import Row
from penstock.infra.sinks.sink import Cursor, SinkSettings, read_cursor, write_cursor
from penstock.infra.sinks.traces import TraceSpan
from penstock.messages.base import Stream

_event: Any = importlib.import_module("tensorboard.compat.proto.event_pb2")
_summary: Any = importlib.import_module("tensorboard.compat.proto.summary_pb2")
_records: Any = importlib.import_module("tensorboard.summary.writer.record_writer")
_FILE = "events.out.tfevents.0000000000.penstock"


class TensorBoardSink:
    """Appends to one file; what stands behind the cursor's length was never finished."""

    def __init__(self, settings: SinkSettings) -> None:
        self._folder = settings.folder
        self._cursor = read_cursor(self._folder) or Cursor()
        path = self._folder / _FILE
        path.touch(mode=0o600)
        os.truncate(path, self._cursor.num_bytes)
        self._file = path.open("ab")
        self._writer = _records.RecordWriter(self._file)
        if not self._cursor.num_bytes:
            self._writer.write(_event.Event(file_version="brain.Event:2").SerializeToString())

    @property
    def after(self) -> dict[Stream, int]:
        """See `Sink.after`."""
        return self._cursor.after

    async def write(
        self, rows: Sequence[Row], spans: Sequence[TraceSpan], after: dict[Stream, int]
    ) -> None:
        """See `Sink.write`."""
        await asyncio.to_thread(self._write, rows, after)

    def _write(self, rows: Sequence[Row], after: dict[Stream, int]) -> None:
        for row in rows:
            summary = _summary.Summary()
            for name, value in row.values.items():
                summary.value.add(tag=name, simple_value=value)
            event = _event.Event(wall_time=row.at, step=row.step, summary=summary)
            self._writer.write(event.SerializeToString())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._cursor = Cursor(after=after, num_bytes=self._file.tell())
        write_cursor(self._folder, self._cursor)

    async def close(self) -> None:
        """See `Sink.close`."""
        self._file.close()
