"""What an actor may use of the outside world."""

import random
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, ParamSpec, Protocol, TypeVar

from penstock.messages.base import Event, Message
from penstock.messages.bus import ObjectStore, PublishReceipt

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=Event)


class Context(Protocol):
    """Clock, randomness, ids, I/O. The runtime makes one for each actor."""

    @property
    def run_id(self) -> str:
        """The run."""
        ...

    @property
    def actor(self) -> str:
        """Name of the actor itself, e.g. `generator-west`."""
        ...

    @property
    def random(self) -> random.Random:
        """Seeded by run seed and actor name."""
        ...

    @property
    def store(self) -> ObjectStore:
        """The run's objects."""
        ...

    def now(self) -> float:
        """Unix seconds."""
        ...

    @property
    def stored_at(self) -> float:
        """Unix seconds at which the followed event in hand was stored."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back."""
        ...

    def new_id(self, prefix: str) -> str:
        """Return an id unique in the run."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Sleep on the actor's clock."""
        ...

    async def publish(self, *events: Event) -> list[PublishReceipt]:
        """Publish durably in the middle of a handler (e.g. a turn of a long episode)."""
        ...

    async def last(self, event_type: type[E], key: str | None = None) -> E | None:
        """Return the newest stored event of a type (of one key, if given), or None."""
        ...

    async def change(self, event_type: type[E], key: str, make: Callable[[E | None], E]) -> E:
        """Replace the newest event of a key by what `make` makes of it, atomically.

        For streams that keep the newest of each subject. `make` is called again where another
        process was quicker; what it raises, this raises, and nothing is stored.

        Returns:
            The event that is stored now.

        """
        ...

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """Ask and wait, visibly: the wait-for graph shows it.

        Raises:
            RemoteCallError: The server replied with RemoteError.
            DeadlineError: No reply in time.

        """
        ...

    def stream_request(
        self,
        service: str,
        message: Message,
        *,
        idle_s: float,
        reason: str = "",
        is_served: bool = False,
    ) -> AsyncGenerator[Message, None]:
        """Ask and iterate over the replies, visibly; see `Bus.stream_request`."""
        ...

    def waiting(
        self, target: str, reason: str, *, deadline_s: float, policy_version: int = -1
    ) -> AbstractAsyncContextManager[None]:
        """Bound and publish a wait: `async with ctx.waiting("judge", "verdict of g3", ...)`.

        Raises:
            DeadlineError: The body did not end within `deadline_s`.

        """
        ...

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in the actor's one worker thread; counted as busy time.

        Raises:
            DeadlineError: It was still running after half an hour.

        """
        ...

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a background task under supervision: its failure is the actor's failure."""
        ...

    def set_gauge(self, name: str, value: float) -> None:
        """Show a number in the next ActorReported."""
        ...
