"""A client for external programs that play rollouts.

Example:
    async def attempt(one: RolloutAttempt) -> float:
        agent = MyAgent(base_url=one.base_url, api_key=one.api_key, model=one.model)
        return await agent.solve(one.task["instruction"])

    await play(url, key, attempt, num_concurrent=8)

"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import aiohttp

from penstock.gateway.rollouts.bodies import AttemptInfo, TakeReply
from penstock.messages.errors import PenstockError
from penstock.messages.reading.parsing import parse_json

log = logging.getLogger(__name__)

_REQUEST_S_MAX = 60.0
_RETRY_S = 1.0
"""Pause after the service could not be reached, as while it restarts."""


class RolloutServiceError(PenstockError, RuntimeError):
    """The service refused a request; the text has its status and message."""


class RolloutAttempt:
    """One attempt at a task: the agent's model URL and key, and the calls that keep and end it."""

    def __init__(self, session: aiohttp.ClientSession, taken: AttemptInfo) -> None:
        """Wrap a taken attempt; `RolloutClient.take` calls this."""
        self._session = session
        self.taken = taken
        self.is_ended = False

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI's clients."""
        return self.taken.base_url

    @property
    def api_key(self) -> str:
        """Key of this attempt alone."""
        return self.taken.api_key

    async def keep(self) -> None:
        """Tell the service that the attempt is still in progress; only needed in long pauses."""
        await self._post("alive", {})

    async def end(self, reward: float | None = None, **fields: Any) -> None:
        """End the attempt.

        Args:
            reward: Reward from 0 to 1; None if the run's own judge grades `files`.
            fields: Further fields of `EndBody`: outcome, files, binaries, deleted, detail.

        Raises:
            RolloutServiceError: The attempt has ended, or a field is invalid.

        """
        await self._post("end", fields | ({} if reward is None else {"reward": reward}))
        self.is_ended = True

    async def _post(self, name: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self.api_key}"}
        url = f"{self.taken.url}/{name}"
        async with self._session.post(url, json=body, headers=headers) as reply:
            if reply.status != 200:
                raise RolloutServiceError(f"{name}: {reply.status} {await reply.text()}")


class RolloutClient:
    """Takes attempts from one service."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        """Use `open_client` instead, which owns the session."""
        self._session = session
        self._url = url.rstrip("/")
        self._key = key

    async def take(self, wait_s: float = 30.0) -> RolloutAttempt | None:
        """Return the next attempt, or None if there is none in time.

        Raises:
            RolloutServiceError: The key is wrong.
            aiohttp.ClientError: The service cannot be reached.

        """
        headers = {"Authorization": f"Bearer {self._key}"}
        url = f"{self._url}/v1/rollouts/take"
        async with self._session.post(url, json={"wait_s": wait_s}, headers=headers) as reply:
            body = await reply.read()
            if reply.status != 200:
                raise RolloutServiceError(f"take: {reply.status} {body.decode()}")
        taken = parse_json(body, TakeReply, "take").attempt
        return None if taken is None else RolloutAttempt(self._session, taken)

    @contextlib.asynccontextmanager
    async def playing(self, attempt: RolloutAttempt) -> AsyncGenerator[RolloutAttempt]:
        """Keep an attempt open during a block; it ends as lost if the block does not end it."""
        keeping = asyncio.create_task(_keep(attempt))
        try:
            yield attempt
        finally:
            keeping.cancel()
            if not attempt.is_ended:
                with contextlib.suppress(RolloutServiceError, aiohttp.ClientError, TimeoutError):
                    await attempt.end(outcome="lost", detail="its program gave it up")


@contextlib.asynccontextmanager
async def open_client(url: str, key: str) -> AsyncGenerator[RolloutClient]:
    """Open a client of the service at `url` (the run's file `rollouts_url`)."""
    timeout = aiohttp.ClientTimeout(total=_REQUEST_S_MAX)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        yield RolloutClient(session, url, key)


async def play(
    url: str,
    key: str,
    attempt: Callable[[RolloutAttempt], Awaitable[float | None]],
    *,
    num_concurrent: int = 8,
) -> None:
    """Play attempts until cancelled.

    Args:
        url: Base URL of the service.
        key: Key of the service (the run's file `rollouts_key`).
        attempt: Plays one attempt and returns its reward; an exception loses the attempt, which is
            then not trained.
        num_concurrent: Attempts at once.

    """
    async with open_client(url, key) as client, asyncio.TaskGroup() as group:
        for _ in range(num_concurrent):
            group.create_task(_play(client, attempt))


async def _play(
    client: RolloutClient, attempt: Callable[[RolloutAttempt], Awaitable[float | None]]
) -> None:
    while True:
        try:
            one = await client.take()
        except (aiohttp.ClientError, TimeoutError) as error:
            log.warning("the rollout service cannot be reached: %s", error)
            await asyncio.sleep(_RETRY_S)
            continue
        if one is None:
            continue
        try:
            async with client.playing(one):
                await one.end(await attempt(one))
        # Custom code may raise anything; it costs only this attempt.
        except Exception:
            log.exception("rollout %s is lost", one.taken.rollout_id)


async def _keep(attempt: RolloutAttempt) -> None:
    while True:
        await asyncio.sleep(attempt.taken.lease_s / 4)
        with contextlib.suppress(RolloutServiceError, aiohttp.ClientError, TimeoutError):
            await attempt.keep()
