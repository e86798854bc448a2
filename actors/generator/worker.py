"""The engine's worker thread: steps of the core, with commands run in between.

    event loop ──commands──▶ inbox ──▶ worker: command, step, step, command, step ...
        ▲                                  │
        └────── call_soon_threadsafe ◀─────┘ chunks

The worker alone touches the core while it runs, so no lock guards the batch.
"""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from penstock.actors.generator.core import EngineCore, Output
from penstock.actors.generator.engine import EngineNotReadyError
from penstock.actors.policy.device import fix_threads
from penstock.messages.errors import DeadlineError

_COMMAND_S = 30.0
"""A command waits for one step at most; this much means that the worker hangs."""

T = TypeVar("T")


class EngineWorker:
    """Runs a core until stopped."""

    def __init__(self, core: EngineCore, deliver: Callable[[list[Output]], None]) -> None:
        """Deliver is called on the event loop with the chunks of a step."""
        self.core = core
        self.is_paused = False
        self.error = ""
        self._deliver = deliver
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_alive(self) -> bool:
        """Whether steps can run."""
        return self._thread.is_alive() and not self._is_stopping

    def start(self) -> None:
        """Start the thread; call on the event loop that gets the chunks."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step in progress.

        Raises:
            DeadlineError: the step does not end.

        """
        if self._is_stopping or self._loop is None:
            return
        self._is_stopping = True
        self.post(lambda: None)
        try:
            async with asyncio.timeout(_COMMAND_S):
                await asyncio.to_thread(self._thread.join)
        except TimeoutError as error:
            raise DeadlineError(f"the engine's worker runs {_COMMAND_S} s after a stop") from error

    def post(self, command: Callable[[], None]) -> None:
        """Run a command between two steps, without waiting for it."""
        self._inbox.put(command)

    async def call(self, command: Callable[[], T]) -> T:
        """Run a command between two steps and return its result.

        Raises:
            EngineNotReadyError: the worker has ended.
            DeadlineError: it did not come to the command in time.

        """
        if not self.is_alive:
            raise EngineNotReadyError(f"the engine does not run {self.error}".rstrip())
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(command())
            except Exception as error:
                future.set_exception(error)

        self.post(run)
        try:
            async with asyncio.timeout(_COMMAND_S):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise DeadlineError(f"no engine step ended within {_COMMAND_S} s") from error

    def emit(self, outputs: list[Output]) -> None:
        """Hand chunks over to the event loop."""
        if outputs and self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _run(self) -> None:
        fix_threads(self.core.options.num_threads)
        try:
            while not self._is_stopping and not self.core.fault:
                self._run_commands()
                if self._has_work():
                    self.emit(self.core.step())
        except Exception as error:
            self.core.fault = repr(error)
        if self.core.fault:
            self.error = self.core.fault
            self.emit(self.core.abort(None))

    def _has_work(self) -> bool:
        core = self.core
        has_requests = core.num_running > 0 or bool(core.waiting)
        return has_requests and not self.is_paused and core.model is not None

    def _run_commands(self) -> None:
        """Run what is in the inbox; wait for something if there is nothing else to do."""
        if not self._has_work():
            self._inbox.get()()
        for _ in range(self._inbox.qsize()):
            self._inbox.get()()
