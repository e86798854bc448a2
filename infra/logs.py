"""Log lines of a process of actors, on stderr: one format for people, one for collectors.

```
2026-11-27T02:14:07.318Z INFO    trainer      penstock.actors.trainer.rl_phase: step 12: ...
{"at": "2026-11-27T02:14:07.318Z", "level": "info", "actor": "trainer", "logger": ..., ...}
```
Levels: `debug` for what happens per turn or request; `info` for starts, readiness, steps, versions
and ends; `warning` for refusals, retries and whatever resolves itself; `error` for what somebody
has to look at. The launcher writes each process's stderr to `logs/<process>.log` of the run.
"""

import json
import logging
import sys
import time

from penstock.actors.runtime.log_context import ActorFilter
from penstock.infra.config.settings import LogFormat, LogLevel


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
    """Send this process's log to stderr, in place of any handler that was there."""
    handler = logging.StreamHandler(sys.stderr)
    # On the handler and not on a logger: filters of loggers do not see their children's records.
    handler.addFilter(ActorFilter())
    handler.setFormatter(_JsonFormatter() if log_format == "json" else _TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
