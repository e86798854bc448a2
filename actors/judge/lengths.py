"""What an episode spent, by kind, counted from its recorded turns. Pure."""

from collections.abc import Sequence

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.token_kinds import TokenKinds
from penstock.kernels.arrays import from_array
from penstock.messages.reward import Lengths
from penstock.messages.rollout import RolloutFinished, Turn
from penstock.messages.task import Task


class LengthMeter:
    """Counts by one chat format's markup."""

    def __init__(self, chat: ChatFormat, summary_request: str) -> None:
        """Take the chat format, and the words that ask for a summary, which no tool returned."""
        self._tokenizer = chat.tokenizer
        self._kinds = TokenKinds(chat.tokenizer)
        self._num_request = self._count(summary_request)

    def measure(self, rollout: RolloutFinished, turns: Sequence[Turn], task: Task) -> Lengths:
        """Return the lengths of an episode of a task.

        Prompts cost nothing: what a later segment reads again was charged where it was sampled.
        """
        counts = [
            self._kinds.count(
                from_array(turn.token_ids).tolist(),
                from_array(turn.context_ids).tolist(),
                is_final=not (turn.calls or turn.parse_error or turn.is_summary),
            )
            for turn in turns
        ]
        return Lengths(
            thinking=sum(one.thinking for one in counts),
            call=sum(one.call for one in counts),
            output=self._num_returned(rollout, turns, task),
            final=sum(one.final for one in counts),
            num_calls=rollout.num_calls,
            num_turns=len(rollout.turns),
        )

    def _num_returned(self, rollout: RolloutFinished, turns: Sequence[Turn], task: Task) -> int:
        """Count what contexts have of tools; the markup of messages counts as theirs."""
        steps = {end + 1: step for end, step in zip(rollout.step_ends, task.steps, strict=False)}
        num_returned = 0
        for index, turn in enumerate(rollout.turns[1:], 1):
            step = steps.get(index)
            if turn.starts_segment or (step and not turns[index - 1].calls):
                continue
            num_asked = self._num_request if turn.is_summary else 0
            if step and not turn.is_summary:
                num_asked = self._count(step.instruction)
            num_returned += max(0, turn.num_context - num_asked)
        return num_returned

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text))
