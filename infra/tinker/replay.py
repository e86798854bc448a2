"""Replays the calls of a server's log: each is computed again, and every digest compared."""

import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from penstock.infra.config.settings import RunConfig
from penstock.infra.output import print_result, write_to
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.tinker.book import TYPES, UNANSWERED, Book, NoSuchError, body_of, readable
from penstock.infra.tinker.executor import Base, CallOutcome, Executor, SavedState
from penstock.infra.tinker.opening import open_base
from penstock.infra.tinker.settings import TinkerConfig
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import ConfigError
from penstock.messages.reading.claims import digest_of
from penstock.messages.requests.tinker import TinkerAnswered, TinkerCalled, TinkerKind, TinkerSaved

Report = dict[str, Any]


async def replay_command(run: RunDir, config: RunConfig, *, as_json: bool) -> int:
    """Replay a server's log and print the outcome; 0 only if every answer is identical."""
    async with open_log(run, "replay") as bus:
        base = await open_base(run.store(), config)
        report = await replay_calls(bus, run.store(), base, config.tinker)
    if as_json:
        print_result(report, as_json=True)
    else:
        found = report["first_difference"] or "identical, bit for bit"
        text = f"{report['calls']} calls of {report['models']} models in {report['wall_s']:.1f} s"
        write_to(sys.stdout, f"{text}: {found}\n")
    return 0 if report["identical"] else 1


async def replay_calls(bus: Bus, store: ObjectStore, base: Base, config: TinkerConfig) -> Report:
    """Compute all answered calls again.

    Returns:
        `calls`, `models`, `identical`, `first_difference`, `weights_digests` by model, `wall_s`.

    """
    book, calls = Book(), dict[str, None]()
    async for delivery in bus.follow(TYPES, stop_at_end=True):
        event = await readable(store, delivery.event)
        book.add(event)
        if isinstance(event, TinkerCalled) and event.kind not in UNANSWERED:
            calls[event.request_id] = None  # In the order of the log, each once.
    if not calls:
        raise ConfigError(f"run {bus.run_id}: expected client calls on its log, found none")
    started = time.monotonic()
    with TemporaryDirectory(prefix="penstock-tinker-") as name:
        replay = _Replay(bus, store, base, config, book, Path(name))
        try:
            for request_id in calls:
                await replay.repeat(request_id)
        finally:
            await replay.executor.close()
    return {
        "calls": replay.num_calls,
        "models": len(replay.digests),
        "identical": not replay.difference and replay.num_calls > 0,
        "first_difference": replay.difference,
        "weights_digests": replay.digests,
        "wall_s": time.monotonic() - started,
    }


class _Replay:
    def __init__(  # noqa: PLR0913, PLR0917 - a log, its objects and its model are independent
        self,
        bus: Bus,
        store: ObjectStore,
        base: Base,
        config: TinkerConfig,
        book: Book,
        folder: Path,
    ) -> None:
        self.executor = Executor(base, config, asyncio.to_thread, self._read_saved)
        self.num_calls = 0
        self.difference = ""
        self.digests: dict[str, str] = {}
        """Last weights digest of each model."""
        self._bus, self._store, self._book = bus, store, book
        self._folder = folder
        """Weights that calls saved, in files: all of them together may not fit into memory."""
        self._saved: dict[str, SavedState] = {}

    async def repeat(self, request_id: str) -> None:
        called = await self._bus.last(TinkerCalled, request_id)
        before = await self._bus.last(TinkerAnswered, request_id)
        call = called.event if called is not None else None
        answered = before.event if before is not None else None
        if not isinstance(call, TinkerCalled) or not isinstance(answered, TinkerAnswered):
            return
        model = self.executor.models.get(call.target)
        if answered.error:
            # It changed nothing, but that a step ends the gradients before it.
            if model is not None and call.kind is TinkerKind.OPTIM_STEP:
                model.clear()
            return
        target = self._book.targets[call.target]
        body = await body_of(self._store, call.body)
        found = await self.executor.run(call, body, target.path)
        self.num_calls += 1
        self._compare(answered, found)
        if found.weights_digest:
            self.digests[call.target] = found.weights_digest
        if found.saved is not None:
            await self._keep(call, found.saved)
        if call.number == target.numbers[-1]:
            self.executor.models.pop(call.target, None)

    def _compare(self, answered: TinkerAnswered, found: CallOutcome) -> None:
        pairs = {
            "answer": (answered.digest, digest_of(found.body)),
            "weights": (answered.weights_digest, found.weights_digest),
            "optimizer": (answered.optimizer_digest, found.optimizer_digest),
        }
        differing = [name for name, (then, now) in pairs.items() if then != now]
        if differing or found.error:
            words = found.error or f"another {', '.join(differing)} than on the log"
            self.difference = self.difference or f"{answered.kind} {answered.request_id}: {words}"

    async def _keep(self, call: TinkerCalled, saved: SavedState) -> None:
        then = await self._bus.last(TinkerSaved, f"{call.target}.{call.number}")
        event = then.event if then is not None else None
        if not isinstance(event, TinkerSaved) or event.digest != digest_of(saved.state):
            words = f"other weights than on the log at {saved.path}"
            self.difference = self.difference or f"{call.kind} {call.request_id}: {words}"
        await asyncio.to_thread(self._file(saved.path).write_bytes, saved.state)
        self._saved[saved.path] = saved._replace(state=b"")

    def _file(self, path: str) -> Path:
        return self._folder / digest_of(path.encode())

    async def _read_saved(self, path: str) -> SavedState:
        if path not in self._saved:
            raise NoSuchError(f"path: there are no weights at {path!r}")
        state = await asyncio.to_thread(self._file(path).read_bytes)
        return self._saved[path]._replace(state=state)
