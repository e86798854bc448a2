"""What the checks of buses share: one server and one run, events to send, and waits.

`world.bus(name)` connects one more simulated or real process to one server and run.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from penstock.messages.base import Message, Stream
from penstock.messages.bus import Bus
from penstock.messages.generation import AbortGeneration
from penstock.messages.task import CreditsChanged, Purpose, Sampling, Split, StartRollout, Task
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import CheckpointSaved, StepCompleted

DEADLINE_S = 60.0
"""Only what hangs meets it."""
T = TypeVar("T")


class World(Protocol):
    """One server and one run."""

    async def bus(self, name: str = "tester") -> Bus:
        """Connect."""
        ...

    async def inject(self, stream: Stream, suffix: str, data: bytes) -> None:
        """Store raw bytes under `ps.<run>.<stream>.<suffix>`."""
        ...

    async def restart_server(self) -> None:
        """Kill -9 and start again."""
        ...


Check = Callable[[World], Awaitable[None]]


def step(n: int, digest: str = "d") -> StepCompleted:
    return StepCompleted(
        step=n, policy_version=n, weights_digest=digest, optimizer_digest="o", metrics={"loss": 0.5}
    )


def saved(n: int) -> CheckpointSaved:
    return CheckpointSaved(step=n, object_key=f"k{n}", weights_digest="d")


def credits(n: int) -> CreditsChanged:
    return CreditsChanged(
        policy_version=n,
        num_groups_granted=n,
        num_groups_trained=0,
        num_groups_discarded=0,
        num_groups_allowed=n,
        staleness_max=1,
    )


def progress(n: int) -> MidtrainProgressed:
    return MidtrainProgressed(num_tokens=n, num_tokens_total=10, loss=1.0)


def task(n: int, text: str = "fix it") -> StartRollout:
    return StartRollout(
        rollout_id=f"r{n}",
        group_id="g",
        group_index=0,
        group_size=1,
        member=0,
        purpose=Purpose.TRAIN,
        task=Task(task_id="t", category="a", split=Split.TRAIN, instruction=text, files={}),
        sampling=Sampling(),
        policy_version=0,
    )


async def echo(message: Message) -> AsyncIterator[Message]:
    """Answer an AbortGeneration of id `n` with n numbered replies."""
    assert isinstance(message, AbortGeneration)
    for n in range(int(message.request_id)):
        yield AbortGeneration(request_id=str(n))


async def take(iterator: AsyncIterator[T], num: int) -> list[T]:
    """Take exactly `num`, within the deadline."""
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(iterator) for _ in range(num)]


async def is_silent(iterator: AsyncIterator[T], for_s: float = 0.3) -> bool:
    """Fingerprint that nothing comes. The iterator cannot be used after."""
    try:
        await asyncio.wait_for(anext(iterator), for_s)
    except TimeoutError:
        return True
    return False
