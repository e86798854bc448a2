"""Ctrl-C and SIGTERM: the first one stops a launcher in order, the second at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Generator
from typing import Any

INTERRUPTED = 130
"""Exit code."""


@contextlib.contextmanager
def interruption() -> Generator[asyncio.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt() -> None:
        if interrupted.is_set():
            os._exit(INTERRUPTED)  # Every child asked to die with its parent.
        interrupted.set()

    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield interrupted
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def before(interrupted: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await the work; False if an interruption came first."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(interrupted.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not working.done():
        working.cancel()
        return False
    working.result()
    return True
