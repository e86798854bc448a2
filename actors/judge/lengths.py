"""What an episode spent, by kind, counted from its recorded turns. Pure."""

from collections.abc import Sequence

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.token_kinds import TokenKinds
from penstock.kernels.arrays import from_array
from penstock.messages.reward import Lengths
from penstock.messages.rollout import RolloutFinished, Turn, TurnSummary


class LengthMeter:
    """Counts by one chat format's markup."""

    def __init__(self, chat: ChatFormat, summary_request: str) -> None:
        """Take the chat format, and the words that ask for a summary, which no tool returned."""
        self._kinds = TokenKinds(chat.tokenizer)
        self._num_request = len(chat.tokenizer.encode(summary_request))

    def measure(self, rollout: RolloutFinished, turns: Sequence[Turn]) -> Lengths:
        """Return the lengths of an episode.

        Prompts cost nothing: what a later segment reads again was charged where it was sampled.
        """
        later = rollout.turns[1:]
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
            output=sum(self._num_returned(turn) for turn in later if not turn.starts_segment),
            final=sum(one.final for one in counts),
            num_calls=rollout.num_calls,
            num_turns=len(rollout.turns),
        )

    def _num_returned(self, turn: TurnSummary) -> int:
        """Count what a turn's context has of tools; the markup of messages counts as theirs."""
        return max(0, turn.num_context - (self._num_request if turn.is_summary else 0))
