"""Checks of who is running: launchers, trainers and actors of a run, and an installer."""

import asyncio
import contextlib
import importlib
import os
import secrets
from collections.abc import AsyncIterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from penstock.infra.bus.jetstream.connection import JetStreamError
from penstock.infra.bus.jetstream.puller import STREAM_NOT_FOUND
from penstock.infra.run.runs import RunDir
from penstock.messages.base import Event, Message, Stream
from penstock.messages.bus import Bus, Delivery
from penstock.messages.control import RanksTaken, RunClosed, RunOpened
from penstock.messages.errors import BusError, ConfigError, DeadlineError
from penstock.messages.rpc import Ack
from penstock.messages.telemetry import ActorReported

# Each by itself: permissions on the bus are derived from these lines.
LAUNCHER = "launcher"
TRAINER = "trainer"
ANSWER_S = 3.0
START_S_MAX = 600.0
"""Longest wait in seconds of a process for its run to start."""
POLL_S = 1.0
SILENT_S = 4.0
"""Silence in seconds after which no actor runs; each reports once a second."""
STOP_S_MAX = 60.0
INSTALL_S_MAX = 3600.0
INSTALL_POLL_S = 0.2
TRAINER_S_MAX = 60.0
"""Longest wait in seconds for another trainer to stop; it may save on the way."""


async def answer(_message: Message) -> AsyncIterator[Message]:
    """Answer a request to LAUNCHER or TRAINER, which shows that one is running."""
    yield Ack()


async def check_alone(bus: Bus) -> None:
    """Check that no other launcher of this run answers, on any host.

    Raises:
        BusError: Another launcher answers.

    """
    if await _answers(bus, LAUNCHER):
        raise BusError(f"run {bus.run_id}: a launcher is running it on another host")


async def until_installed(pid: int, name: str) -> None:
    """Wait for the process that installs a package, and check that the package is complete.

    Raises:
        ConfigError: The package is missing or incomplete, or the process id is not usable.
        DeadlineError: The process did not end in time.

    """
    if pid <= 1 or pid == os.getpid():
        raise ConfigError(f"--after: expected the id of a process that ends, got {pid}")
    give_up_at = asyncio.get_running_loop().time() + INSTALL_S_MAX
    # The start time guards against another process that gets the same id.
    began = _began(pid)
    while began and _began(pid) == began:
        if asyncio.get_running_loop().time() >= give_up_at:
            raise DeadlineError(f"--after {pid}: still running after {INSTALL_S_MAX:g} s")
        await asyncio.sleep(INSTALL_POLL_S)
    importlib.invalidate_caches()
    if not _is_whole(name):
        text = f"expected it to install {name}, which is missing or incomplete"
        raise ConfigError(f"--after {pid}: {text}; run the installation again")


def _began(pid: int) -> bytes:
    """Return the start time of a process in ticks; empty once it has ended, reaped or not."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return b""
    return b"" if fields[0] in {b"Z", b"X"} else fields[19]


def _is_whole(name: str) -> bool:
    # Installers write the file INSTALLER last.
    try:
        return distribution(name).read_text("INSTALLER") is not None
    except PackageNotFoundError:
        return False


async def become_trainer(bus: Bus) -> None:
    """Become the only trainer of the ranks of a run; wait for another one that is stopping.

    Raises:
        BusError: Another trainer still answers after TRAINER_S_MAX, or took over first.

    """
    now = asyncio.get_running_loop().time
    give_up_at = now() + TRAINER_S_MAX
    taken = RanksTaken(incarnation=secrets.token_hex(8))
    while True:
        before = await last_stored(bus, RanksTaken)
        if not await _answers(bus, TRAINER):
            # Several trainers may hear no answer at the same time; the compare-and-swap on the
            # log lets only one of them through.
            stop = await bus.serve(TRAINER, answer)
            receipt = await bus.swap(taken, before.sequence if before else 0)
            if not receipt.is_duplicate:
                return
            await stop()
        if now() >= give_up_at:
            raise BusError(
                f"run {bus.run_id}: its ranks belong to another trainer, which is running"
            )
        await asyncio.sleep(POLL_S)


async def _answers(bus: Bus, service: str) -> bool:
    with contextlib.suppress(DeadlineError):
        await bus.request(service, Ack(), deadline_s=ANSWER_S)
        return True
    return False


async def has_launcher(run: RunDir, bus: Bus) -> bool:
    """Return whether a run is open and its launcher answers; a killed one leaves it open."""
    return await is_up(run, bus) and (run.access() is None or await _answers(bus, LAUNCHER))


async def is_up(run: RunDir, bus: Bus) -> bool:
    """Return whether a run is open, according to the launcher process or the log."""
    if run.access() is None:
        return run.read_state() is not None
    return await _open_at(bus) is not None


async def until_open(bus: Bus, wait_s: float = START_S_MAX) -> int | None:
    """Wait for a launcher; return the sequence of its `RunOpened`, or None if the run is complete.

    Raises:
        DeadlineError: No launcher started in time.

    """
    try:
        async with asyncio.timeout(wait_s):
            while True:
                if (sequence := await _open_at(bus)) is not None or await _is_complete(bus):
                    return sequence
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise DeadlineError(f"run {bus.run_id}: no launcher came up within {wait_s:g} s") from error


async def until_closed(bus: Bus, after: int) -> bool:
    """Wait until the launcher opened at `after` stops; return whether the run is complete."""
    # A launcher that is killed publishes nothing: actors continue, and it finds them on restart.
    async with contextlib.aclosing(bus.follow([RunClosed], after={Stream.CONTROL: after})) as log:
        async for delivery in log:
            assert isinstance(delivery.event, RunClosed)
            return delivery.event.is_complete
    return False


async def _open_at(bus: Bus) -> int | None:
    """Return the sequence at which the newest launcher started, or None if it has stopped."""
    opened, closed = await last_stored(bus, RunOpened), await last_stored(bus, RunClosed)
    if opened is None or (closed is not None and closed.sequence > opened.sequence):
        return None
    return opened.sequence


async def _is_complete(bus: Bus) -> bool:
    closed = await last_stored(bus, RunClosed)
    return closed is not None and isinstance(closed.event, RunClosed) and closed.event.is_complete


async def until_silent(bus: Bus) -> None:
    """Wait until no actor on any host reports anymore; give up after STOP_S_MAX."""
    now = asyncio.get_running_loop().time
    newest, heard_at, give_up_at = -1, now(), now() + STOP_S_MAX
    while now() < min(heard_at + SILENT_S, give_up_at):
        report = await bus.last(ActorReported)
        if report is not None and report.sequence != newest:
            newest, heard_at = report.sequence, now()
        await asyncio.sleep(POLL_S)


async def last_stored(bus: Bus, kind: type[Event]) -> Delivery | None:
    """Return the newest event of a type, or None; also None before the streams exist."""
    try:
        return await bus.last(kind)
    except JetStreamError as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        return None
