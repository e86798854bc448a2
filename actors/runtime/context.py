"""The interface through which an actor reaches the outside world."""

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
    """Clock, randomness, ids and I/O of one actor, created by the runtime."""

    @property
    def run_id(self) -> str:
        """Id of the run."""
        ...

    @property
    def actor(self) -> str:
        """Name of this actor, e.g. `generator-west`."""
        ...

    @property
    def random(self) -> random.Random:
        """Random generator, seeded by the run seed and the actor name."""
        ...

    @property
    def store(self) -> ObjectStore:
        """Object store of the run."""
        ...

    def now(self) -> float:
        """Return the Unix time in seconds."""
        ...

    @property
    def stored_at(self) -> float:
        """Unix time at which the followed event being handled was stored, in seconds."""
        ...

    @property
    def is_caught_up(self) -> bool:
        """Whether a fold has read what the log held when it started (`Actor.saved`)."""
        ...

    def monotonic(self) -> float:
        """Return a time in seconds that never goes backwards."""
        ...

    def new_id(self, prefix: str) -> str:
        """Return an id that is unique in the run."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Sleep on the actor's clock."""
        ...

    async def publish(self, *events: Event) -> list[PublishReceipt]:
        """Publish durably from within a handler (e.g. one turn of a long episode)."""
        ...

    async def last(self, event_type: type[E], key: str | None = None) -> E | None:
        """Return the newest stored event of a type, and of `key` if given, or None."""
        ...

    async def change(self, event_type: type[E], key: str, make: Callable[[E | None], E]) -> E:
        """Replace the newest event of a key with the result of `make`, atomically.

        For streams that keep only the newest event per subject. If another process stores one in
        between, `make` is called again. If `make` raises, the error propagates and nothing is
        stored.

        Returns:
            The event that was stored.

        """
        ...

    async def request(
        self, service: str, message: Message, *, deadline_s: float, reason: str = ""
    ) -> Message:
        """Send a request and wait for the reply; the wait-for graph shows the wait.

        Raises:
            RemoteCallError: The server replied with RemoteError.
            DeadlineError: No reply came in time.

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
        """Send a request and iterate over its replies, each a wait; see `Bus.stream_request`."""
        ...

    def waiting(
        self, target: str, reason: str, *, deadline_s: float, policy_version: int = -1
    ) -> AbstractAsyncContextManager[None]:
        """Report a wait and bound it: `async with ctx.waiting("judge", "verdict of g3", ...)`.

        Raises:
            DeadlineError: The body did not end within `deadline_s` seconds.

        """
        ...

    async def offload(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run blocking work in the actor's single worker thread; it counts as busy time.

        Raises:
            DeadlineError: The work was still running after half an hour.

        """
        ...

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run a background task under supervision: if it fails, the actor fails."""
        ...

    def set_gauge(self, name: str, value: float) -> None:
        """Set a metric that the next `ActorReported` includes."""
        ...
