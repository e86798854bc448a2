"""The actor that hands out attempts to external programs instead of rollout workers.

```
 StartRollout ─▶ waiting ──client takes──▶ open ──client ends──▶ RolloutFinished
                    │                        │
                    └─ nobody takes it       └─ client is silent ─▶ infrastructure failure
```
A command is done when its end is stored. Killed at any moment, the service loses no attempt: the
command is delivered again. One that has stored turns then ends as an infrastructure failure, since
its client's conversation cannot be resumed; one that has none waits for a client again.
"""

import asyncio
import hmac
import logging
import secrets
from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

import msgspec

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.replicas.table import ReplicaTable
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.gateway.config import GatewayConfig
from penstock.gateway.exchange.plan import Planner
from penstock.gateway.keys import hash_key
from penstock.gateway.listening import Listener
from penstock.gateway.rollouts.app import build_app
from penstock.gateway.rollouts.config import RolloutsConfig
from penstock.gateway.rollouts.episode import ExternalEpisode, OpenAttempt
from penstock.messages.base import Event, Stream
from penstock.messages.control import MessageRejected
from penstock.messages.generation import ReplicaReported
from penstock.messages.reading.rejected import read_rejected
from penstock.messages.rollout import EpisodeEnd, RolloutFinished
from penstock.messages.task import StartRollout

log = logging.getLogger(__name__)

NUM_ENDED_KEPT = 1024
"""Ended attempts whose end can be asked for again."""


class RolloutService(Actor):
    """Hands out the rollouts of a run to external programs over HTTP."""

    # The work queue's name, since the service replaces rollout workers.
    role = "rollout_worker"
    consumes: ClassVar[tuple[type[Event], ...]] = (StartRollout,)
    follows: ClassVar[tuple[type[Event], ...]] = (MessageRejected, ReplicaReported)
    tick_s = 1.0

    def __init__(  # noqa: PLR0913 - the policy, the settings and the key are independent inputs
        self,
        chat: ChatFormat,
        config: RolloutsConfig,
        worker: RolloutWorkerConfig,
        gateway: GatewayConfig,
        *,
        key_hash: str,
        on_listening: Callable[[str], None] = lambda url: None,
    ) -> None:
        """Prepare; nothing listens before `start`.

        Args:
            chat: Chat format of the policy.
            config: Address and limits.
            worker: Limits on the sampling of a turn.
            gateway: Context window and limits on connections.
            key_hash: SHA-256 in hex of the key with which clients take attempts.
            on_listening: Callback that gets the base URL once it listens.

        """
        self.config = config
        self.num_concurrent = config.num_concurrent
        self.chat = chat
        self._worker = worker
        # The task limits the length of a turn.
        self._planner = Planner(
            msgspec.structs.replace(gateway, reply_tokens_max=gateway.context_tokens_max), chat
        )
        self._listener = Listener(
            msgspec.structs.replace(
                gateway,
                host=config.host,
                port=config.port,
                num_connections_max=config.num_connections_max,
                is_one_of_several=False,
            )
        )
        self._key_hash = key_hash
        self._on_listening = on_listening
        self._replicas = ReplicaTable()
        self._waiting: OrderedDict[str, OpenAttempt] = OrderedDict()
        self._taken: dict[str, OpenAttempt] = {}
        self._ended: OrderedDict[str, OpenAttempt] = OrderedDict()
        """The newest ended attempts: a client that missed the response to its end asks again."""
        self._arrived = asyncio.Condition()
        self._ctx: Context | None = None

    async def start(self, ctx: Context) -> Effects:
        """Listen for clients.

        Raises:
            OSError: The address is in use.

        """
        self._ctx = ctx
        url = await self._listener.start(build_app(self, self._listener.note_busy))
        log.info("rollouts are handed out at %s", url)
        self._on_listening(url)
        return ()

    async def stop(self, ctx: Context) -> Effects:
        """Refuse new requests; open attempts are delivered again to the next process."""
        await self._listener.stop()
        self._planner.close()
        return ()

    def now(self) -> float:
        """Return the time in Unix seconds."""
        assert self._ctx is not None, "it has started"
        return self._ctx.now()

    def is_client(self, key: str) -> bool:
        """Return whether a bearer key may take attempts."""
        return hmac.compare_digest(hash_key(key), self._key_hash)

    async def take(self, wait_s: float) -> OpenAttempt | None:
        """Hand the longest-waiting attempt to a client, with a new key; None if there is none."""
        try:
            async with asyncio.timeout(wait_s), self._arrived:
                await self._arrived.wait_for(lambda: bool(self._waiting))
                rollout_id, attempt = self._waiting.popitem(last=False)
        except TimeoutError:
            return None
        assert self._ctx is not None, "it has started"
        attempt.key = f"psk-{secrets.token_urlsafe(32)}"
        attempt.seen_at = self._ctx.monotonic()
        self._taken[rollout_id] = attempt
        log.info("rollout %s is taken", rollout_id)
        return attempt

    async def put_back(self, attempt: OpenAttempt) -> None:
        """Let another client take an attempt whose client left before receiving it."""
        rollout_id = attempt.episode.command.rollout_id
        async with self._arrived:
            if self._taken.pop(rollout_id, None) is not None:
                attempt.key = ""
                self._waiting[rollout_id] = attempt
                self._waiting.move_to_end(rollout_id, last=False)
                self._arrived.notify()

    def find(self, rollout_id: str, key: str) -> OpenAttempt | None:
        """Return a taken attempt for a request of its client, which counts as a sign of life."""
        attempt = self._taken.get(rollout_id) or self._ended.get(rollout_id)
        if attempt is None or not attempt.admits(key):
            return None
        assert self._ctx is not None, "it has started"
        attempt.seen_at = self._ctx.monotonic()
        return attempt

    async def on_start_rollout(self, command: StartRollout, ctx: Context) -> Effects:
        """Wait until a client has played the attempt."""
        if await ctx.last(RolloutFinished, command.rollout_id) is not None:
            return ()
        episode = ExternalEpisode(
            command, self.chat, self._planner, self._worker, ctx, self._replicas
        )
        if await episode.load_turns():
            text = "the process that served its client ended"
            await episode.end(EpisodeEnd.INFRASTRUCTURE_ERROR, error=text)
            return (await episode.ended,)
        attempt = OpenAttempt(episode, ctx.monotonic())
        async with self._arrived:
            self._waiting[command.rollout_id] = attempt
            self._arrived.notify()
        try:
            return (await episode.ended,)
        finally:
            self._waiting.pop(command.rollout_id, None)
            if self._taken.pop(command.rollout_id, None) is not None:
                self._ended[command.rollout_id] = attempt
            while len(self._ended) > NUM_ENDED_KEPT:
                self._ended.popitem(last=False)
            self._replicas.leave(command.rollout_id)

    async def on_message_rejected(self, event: MessageRejected, ctx: Context) -> Effects:
        """Report a command that no service will execute as failed, so its group does not wait."""
        if event.source_stream != Stream.TASKS:
            return ()
        command = await read_rejected(ctx.store, event, StartRollout)
        if command is None or await ctx.last(RolloutFinished, command.rollout_id) is not None:
            return ()
        episode = ExternalEpisode(
            command, self.chat, self._planner, self._worker, ctx, self._replicas
        )
        await episode.load_turns()
        await episode.end(EpisodeEnd.INFRASTRUCTURE_ERROR, error=f"rejected: {event.cause}")
        return (await episode.ended,)

    async def on_replica_reported(self, event: ReplicaReported, ctx: Context) -> Effects:
        """Record a replica, which may be asked for tokens."""
        self._replicas.add(event, ctx.monotonic())
        return ()

    async def on_tick(self, ctx: Context) -> Effects:
        """End attempts with a silent client, and those that nobody takes."""
        now, config = ctx.monotonic(), self.config
        self._replicas.expire(now)
        ctx.set_gauge("episodes", len(self._taken))
        for attempts, s_max, text in (
            (self._taken, config.lease_s, "its client was silent"),
            (self._waiting, config.untaken_s_max, "no client took it"),
        ):
            for rollout_id, attempt in [*attempts.items()]:
                # Ending a busy attempt would block this actor until its reply.
                if now - attempt.seen_at > s_max and not attempt.episode.is_busy:
                    log.warning("rollout %s ends: %s for %g s", rollout_id, text, s_max)
                    error = f"{text} for {s_max:g} s"
                    await attempt.episode.end(EpisodeEnd.INFRASTRUCTURE_ERROR, error=error)
        return ()
