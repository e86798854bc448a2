"""Who is up: launchers and actors of a run, by the log and by their answers; and an installer."""

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

LAUNCHER, TRAINER = "launcher", "trainer"
ANSWER_S = 3.0
START_S_MAX = 600.0
"""How long a process waits for its run to start."""
POLL_S = 1.0
SILENT_S = 4.0
"""Actors report once a second: after this time none runs."""
STOP_S_MAX = 60.0
INSTALL_S_MAX = 3600.0
INSTALL_POLL_S = 0.2
TRAINER_S_MAX = 60.0
"""How long a trainer waits for the end of another one, which may save while it stops."""


async def answer(_message: Message) -> AsyncIterator[Message]:
    """Serve LAUNCHER or TRAINER: the answer says that one is up."""
    yield Ack()


async def check_alone(bus: Bus) -> None:
    """Check that no other launcher of this run answers, on any host.

    Raises:
        BusError: One does.

    """
    if await _answers(bus, LAUNCHER):
        raise BusError(f"run {bus.run_id}: a launcher is running it on another host")


async def until_installed(pid: int, name: str) -> None:
    """Return once a process that installs a package has ended, and the package is there, whole.

    Raises:
        ConfigError: It is not, or this is no process to wait for.
        DeadlineError: The process did not end.

    """
    if pid <= 1 or pid == os.getpid():
        raise ConfigError(f"--after: expected the id of a process that ends, got {pid}")
    give_up_at = asyncio.get_running_loop().time() + INSTALL_S_MAX
    began = _began(pid)
    while began and _began(pid) == began:
        if asyncio.get_running_loop().time() >= give_up_at:
            raise DeadlineError(f"--after {pid}: still runs after {INSTALL_S_MAX:g} s")
        await asyncio.sleep(INSTALL_POLL_S)
    importlib.invalidate_caches()
    if not _is_whole(name):
        text = f"expected it to install {name}, which is not there or not whole"
        raise ConfigError(f"--after {pid}: {text}; run the installation again")


def _began(pid: int) -> bytes:
    """Return when a process began, in ticks; empty once it has ended, also if nobody waited yet.

    Another process that gets the same id began later.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return b""
    return b"" if fields[0] in {b"Z", b"X"} else fields[19]


def _is_whole(name: str) -> bool:
    """Whether a package is installed: who installs it writes its own name there last."""
    try:
        return distribution(name).read_text("INSTALLER") is not None
    except PackageNotFoundError:
        return False


async def become_trainer(bus: Bus) -> None:
    """Become the one trainer of a run's ranks, once another that is stopping is gone.

    Raises:
        BusError: Another trainer still answers after TRAINER_S_MAX, or came first.

    """
    now = asyncio.get_running_loop().time
    give_up_at = now() + TRAINER_S_MAX
    taken = RanksTaken(incarnation=secrets.token_hex(8))
    while True:
        before = await last_stored(bus, RanksTaken)
        if not await _answers(bus, TRAINER):
            # Of those that hear nobody at the same time, the log lets one through.
            stop = await bus.serve(TRAINER, answer)
            receipt = await bus.swap(taken, before.sequence if before else 0)
            if not receipt.is_duplicate:
                return
            await stop()
        if now() >= give_up_at:
            raise BusError(f"run {bus.run_id}: its ranks belong to another trainer, which is up")
        await asyncio.sleep(POLL_S)


async def _answers(bus: Bus, service: str) -> bool:
    with contextlib.suppress(DeadlineError):
        await bus.request(service, Ack(), deadline_s=ANSWER_S)
        return True
    return False


async def has_launcher(run: RunDir, bus: Bus) -> bool:
    """Return whether a run is up and its launcher alive; one that was killed closed nothing."""
    return await is_up(run, bus) and (run.access() is None or await _answers(bus, LAUNCHER))


async def is_up(run: RunDir, bus: Bus) -> bool:
    """Return whether a run is open: by its launcher's process, or by the log of its servers."""
    if run.access() is None:
        return run.read_state() is not None
    return await _open_at(bus) is not None


async def until_open(bus: Bus, wait_s: float = START_S_MAX) -> int | None:
    """Wait until a launcher is up; return the sequence of its `RunOpened`, None for a complete run.

    Raises:
        DeadlineError: None came in time.

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
    """Wait until the launcher that came up at a sequence stops; return if the run is complete.

    A launcher that dies says nothing: the actors go on, and its next start finds them at work.
    """
    async with contextlib.aclosing(bus.follow([RunClosed], after={Stream.CONTROL: after})) as log:
        async for delivery in log:
            assert isinstance(delivery.event, RunClosed)
            return delivery.event.is_complete
    return False


async def _open_at(bus: Bus) -> int | None:
    """Return the sequence at which the newest launcher came up; None if it has stopped since."""
    opened, closed = await last_stored(bus, RunOpened), await last_stored(bus, RunClosed)
    if opened is None or (closed is not None and closed.sequence > opened.sequence):
        return None
    return opened.sequence


async def _is_complete(bus: Bus) -> bool:
    closed = await last_stored(bus, RunClosed)
    return closed is not None and isinstance(closed.event, RunClosed) and closed.event.is_complete


async def until_silent(bus: Bus) -> None:
    """Wait until no actor reports any more, on any host; give up after STOP_S_MAX."""
    now = asyncio.get_running_loop().time
    newest, heard_at, give_up_at = -1, now(), now() + STOP_S_MAX
    while now() < min(heard_at + SILENT_S, give_up_at):
        report = await bus.last(ActorReported)
        if report is not None and report.sequence != newest:
            newest, heard_at = report.sequence, now()
        await asyncio.sleep(POLL_S)


async def last_stored(bus: Bus, kind: type[Event]) -> Delivery | None:
    """Return the newest event of a type; None, too, before the streams are there."""
    try:
        return await bus.last(kind)
    except JetStreamError as error:
        if error.code != STREAM_NOT_FOUND:
            raise
        return None
