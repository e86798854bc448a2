"""The background tasks of one actor: the first failure is the actor's."""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Tasks:
    """Starts tasks and keeps them; `failed` is done with the first error of any."""

    def __init__(self) -> None:
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In the order of their start: a set's order differs from run to run."""
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine under supervision."""
        task = asyncio.create_task(coroutine, name=name)
        self._tasks[task] = None
        task.add_done_callback(self._on_done)

    async def settled(self, within_s: float) -> bool:
        """Wait until all have ended; False when `within_s` was not enough."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=within_s)
        return not self._tasks

    async def cancel(self) -> None:
        """End all, and wait for their clean-up."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Let go of the verdict; nobody asks for it any more."""
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
