"""The rollout worker: takes commands and carries out their episodes, many at once."""

from typing import ClassVar

from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.episode import Episode
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event, Stream
from penstock.messages.codec import decode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import StartRollout


class RolloutWorker(Actor):
    """Shares the work queue with its like; a command is done when its `RolloutFinished` is kept.

    Killed at any moment, it loses nothing: the command is delivered again, and the next worker
    goes on from the stored turns.
    """

    role = "rollout_worker"
    consumes: ClassVar[tuple[type[Event], ...]] = (StartRollout,)
    follows: ClassVar[tuple[type[Event], ...]] = (MessageRejected,)

    def __init__(self, tokenizer: Tokenizer, config: RolloutWorkerConfig) -> None:
        """Take the tokenizer that the policy was trained with."""
        self.num_concurrent = config.num_concurrent
        self._tokenizer = tokenizer
        self._config = config
        self._num_running = 0

    async def on_start_rollout(self, command: StartRollout, ctx: Context) -> Effects:
        """Attempt a task once, unless that was done already."""
        if await ctx.last(RolloutFinished, command.rollout_id) is not None:
            return ()
        self._num_running += 1
        ctx.set_gauge("episodes", self._num_running)
        try:
            return (await Episode(command, self._tokenizer, self._config, ctx).run(),)
        finally:
            self._num_running -= 1
            ctx.set_gauge("episodes", self._num_running)

    async def on_message_rejected(self, event: MessageRejected, ctx: Context) -> Effects:
        """Account for a command that nobody will carry out: its group must not wait for ever."""
        if event.source_stream != Stream.TASKS:
            return ()
        try:
            command = decode(event.data)
        except CodecError:
            return ()
        if not isinstance(command, StartRollout):
            return ()
        if await ctx.last(RolloutFinished, command.rollout_id) is not None:
            return ()
        episode = Episode(command, self._tokenizer, self._config, ctx)
        return (await episode.abandon(f"rejected: {event.cause}"),)
