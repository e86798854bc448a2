"""Processes that start and end together."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence

from penstock.infra.ranks.environment import is_rank

STOP_S = 45.0
"""Longest orderly stop of a process before it is killed."""
KILL_S = 60.0
"""Longest time that the kernel may take to end a killed process, whose memory it frees."""


def units(processes: Mapping[str, list[str]]) -> list[dict[str, list[str]]]:
    """Divide processes (name -> roles) into units: all ranks, and each other one by itself."""
    ranks = {name: specs for name, specs in processes.items() if is_rank(specs)}
    others = [{name: specs} for name, specs in processes.items() if name not in ranks]
    return [ranks, *others] if ranks else others


async def first_to_end(processes: dict[str, Process]) -> str:
    """Wait until one of some processes ends; kill the others; return which it was."""
    waiting = {asyncio.create_task(process.wait()): name for name, process in processes.items()}
    try:
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        # Where several ended at once, a killed one is the cause: the others noticed its end.
        ended = [(p.returncode, n) for n, p in processes.items() if p.returncode is not None]
        for process in processes.values():
            if process.returncode is None:
                process.kill()
        async with asyncio.timeout(KILL_S):
            await asyncio.gather(*waiting)
        return min(ended)[1]
    finally:
        for task in waiting:
            task.cancel()


async def stop_processes(processes: Sequence[Process]) -> None:
    """Ask processes to end; kill those that outlast the deadline."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(STOP_S):
            await asyncio.gather(*(p.wait() for p in running))
    except TimeoutError:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        async with asyncio.timeout(KILL_S):
            await asyncio.gather(*(p.wait() for p in running))
