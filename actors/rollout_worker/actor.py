"""The rollout worker: takes commands and carries out their episodes, many at once."""

from typing import ClassVar

from penstock.actors.policy.tokenizer import Tokenizer
from penstock.actors.rollout_worker.config import RolloutWorkerConfig
from penstock.actors.rollout_worker.rollout_runner import RolloutRunner, Slots
from penstock.actors.runtime.actor import Actor, Effects
from penstock.actors.runtime.context import Context
from penstock.messages.base import Event, Stream
from penstock.messages.codec import decode
from penstock.messages.control import MessageRejected
from penstock.messages.errors import CodecError
from penstock.messages.task import StartRollout


class RolloutWorker(Actor):
    """Shares the work queue with its like; a command is done when its rollouts' ends are kept.

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
        self._slots = Slots(config.num_concurrent)

    async def on_start_rollout(self, command: StartRollout, ctx: Context) -> Effects:
        """Attempt a task once, or as a tree, as far as that was not done already."""
        return await self._runner(command, ctx).run()

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
        return await self._runner(command, ctx).abandon(f"rejected: {event.cause}")

    def _runner(self, command: StartRollout, ctx: Context) -> RolloutRunner:
        return RolloutRunner(command, self._tokenizer, self._config, ctx, self._slots)
