"""Supervised background tasks of one actor; the first task to fail makes the actor fail."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """A set of running tasks; the future `failed` receives the first error of any of them."""

    def __init__(self) -> None:
        # A dict keeps start order; the order of a set would differ from run to run.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine under supervision."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)

    async def settled(self, within_s: float) -> bool:
        """Wait up to `within_s` seconds for all tasks to end; return whether they did."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        return not self._tasks

    async def cancel(self) -> None:
        """Cancel all tasks and wait for their cleanup."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Discard `failed`; nobody will await it anymore."""
        # Retrieve the error, or asyncio logs "exception was never retrieved" at collection.
        if self.failed.done():
            self.failed.exception()
        else:
            self.failed.cancel()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None and not self.failed.done():
            self.failed.set_exception(error)
