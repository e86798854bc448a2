"""What an episode spent, by kind, counted from its recorded turns. Pure."""

from collections.abc import Sequence

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.token_kinds import TokenKinds
from penstock.kernels.arrays import from_array
from penstock.messages.reward import Lengths
from penstock.messages.rollout import RolloutFinished, Turn


class LengthMeter:
    """Counts by one chat format's markup."""

    def __init__(self, chat: ChatFormat) -> None:
        self._kinds = TokenKinds(chat.tokenizer)

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
            output=sum(turn.num_context for turn in later if not turn.starts_segment),
            final=sum(one.final for one in counts),
            num_calls=rollout.num_calls,
            num_turns=len(rollout.turns),
        )
