"""Ctrl-C and SIGTERM: the first one stops a launcher in order, the second at once."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Coroutine, Generator
from typing import Any

INTERRUPTED = 130
"""Exit code after an interruption, as shells use it for SIGINT."""


@contextlib.contextmanager
def interruption() -> Generator[asyncio.Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets; the second ends the process at once."""
    loop = asyncio.get_running_loop()
    interrupted = asyncio.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def interrupt() -> None:
        if interrupted.is_set():
            # Every child asked the kernel to kill it when its parent dies.
            os._exit(INTERRUPTED)
        interrupted.set()

    for number in numbers:
        loop.add_signal_handler(number, interrupt)
    try:
        yield interrupted
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def before(interrupted: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Await the work and return True; cancel it and return False after an interruption."""
    working, waiting = asyncio.create_task(work), asyncio.create_task(interrupted.wait())
    await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if not working.done():
        working.cancel()
        return False
    working.result()
    return True
