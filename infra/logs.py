"""Log lines of a process of actors, on stderr: one format for people, one for collectors.

```
2026-11-27T02:14:07.318Z INFO    trainer      penstock.actors.trainer.rl_phase: step 12: ...
{"at": "2026-11-27T02:14:07.318Z", "level": "info", "actor": "trainer", "logger": ..., ...}
```
Levels: `debug` for what happens per turn or request; `info` for starts, readiness, steps, versions
and ends; `warning` for refusals, retries and whatever resolves itself; `error` for what somebody
has to look at. The launcher writes each process's stderr to `logs/<process>.log` of the run, and
its own log to `logs/launcher.log`.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

from penstock.actors.runtime.log_context import ActorFilter
from penstock.infra.config.settings import LogFormat, LogLevel

H = TypeVar("H", bound=logging.Handler)


class _TextFormatter(logging.Formatter):
    """Time in UTC, level, actor, logger, message; a traceback follows on lines of its own."""

    converter = time.gmtime
    default_msec_format = "%s.%03dZ"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(actor)-12s %(name)s: %(message)s")


class _JsonFormatter(_TextFormatter):
    """One object per line, so that a traceback cannot be torn apart by a collector."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON."""
        line = {
            "at": self.formatTime(record),
            "level": record.levelname.lower(),
            "actor": getattr(record, "actor", "-"),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure_logs(level: LogLevel, log_format: LogFormat) -> None:
    """Send the log of a process of actors to stderr, in place of any handler that was there."""
    handler = _formatted(logging.StreamHandler(sys.stderr), log_format)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


@contextlib.contextmanager
def launcher_log(path: Path, level: LogLevel, log_format: LogFormat) -> Generator[None]:
    """Append the launcher's log to a file inside the block; warnings also go to the terminal.

    The terminal shows progress, between which lines of every level would be lost on a reader.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = _formatted(logging.FileHandler(path, encoding="utf-8"), log_format)
    terminal = _formatted(logging.StreamHandler(sys.stderr), log_format)
    terminal.setLevel(logging.WARNING)
    root, level_before = logging.getLogger(), logging.getLogger().level
    root.addHandler(file)
    root.addHandler(terminal)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        # The command may run inside another program, whose logging stays as it was.
        root.setLevel(level_before)
        root.removeHandler(terminal)
        root.removeHandler(file)
        file.close()


def _formatted(handler: H, log_format: LogFormat) -> H:
    # On the handler and not on a logger: filters of loggers do not see their children's records.
    handler.addFilter(ActorFilter())
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    return handler
