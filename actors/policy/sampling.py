"""What a generator sampled: chunks joined into a turn."""

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParseFailure
from penstock.kernels.arrays import from_array, to_array
from penstock.messages.errors import BusError
from penstock.messages.generation import TokensSampled
from penstock.messages.rollout import StopReason, Turn, VersionSpan


class BrokenTurnError(BusError):
    """The replies ended before the turn did, or are not those of a generator."""


class SampledTokens(msgspec.Struct, kw_only=True):
    """What has been sampled of one turn so far.

    Shapes: N tokens; `token_ids` [N], `logprobs` [N] (behavior logprobs).
    """

    token_ids: list[int] = []
    logprobs: list[float] = []
    version_spans: list[VersionSpan] = []
    route_segments: list[bytes] = []
    arithmetic: str = ""
    stop_reason: StopReason | None = None
    replica: str = ""

    @property
    def min_policy_version(self) -> int:
        """The oldest version that drew a token; -1 before the first token."""
        return min((span.policy_version for span in self.version_spans), default=-1)

    def add(self, chunk: TokensSampled) -> list[int]:
        """Append a chunk; return its token ids.

        Raises:
            BrokenTurnError: Not one logprob per token.

        """
        ids: list[int] = from_array(chunk.token_ids).tolist()
        logprobs: list[float] = from_array(chunk.behavior_logprobs).tolist()
        if len(ids) != len(logprobs):
            raise BrokenTurnError(f"{len(ids)} tokens with {len(logprobs)} logprobs")
        self.token_ids += ids
        self.logprobs += logprobs
        self.replica = chunk.replica or self.replica
        self.route_segments = chunk.route_segments or self.route_segments
        self.arithmetic = chunk.arithmetic
        self.stop_reason = chunk.stop_reason
        if ids:
            self._extend_spans(chunk.policy_version, len(ids))
        return ids

    def _extend_spans(self, policy_version: int, num_tokens: int) -> None:
        if self.version_spans and self.version_spans[-1].policy_version == policy_version:
            num_tokens += self.version_spans.pop().num_tokens
        span = VersionSpan(policy_version=policy_version, num_tokens=num_tokens)
        self.version_spans.append(span)


def make_turn(
    chat: ChatFormat, context_ids: Sequence[int], sampled: SampledTokens, tools: OfferedTools
) -> Turn:
    """Parse what was sampled after `context_ids` into a turn of at least one token."""
    assert sampled.token_ids, "a request without a token has no turn"
    parsed = chat.parse_turn(sampled.token_ids, context_ids, tools)
    is_parsed = not isinstance(parsed, ParseFailure)
    return Turn(
        context_ids=to_array(np.asarray(context_ids, np.int32)),
        token_ids=to_array(np.asarray(sampled.token_ids, np.int32)),
        behavior_logprobs=to_array(np.asarray(sampled.logprobs, np.float32)),
        route_segments=sampled.route_segments,
        arithmetic=sampled.arithmetic,
        version_spans=sampled.version_spans,
        stop_reason=sampled.stop_reason or StopReason.ABORTED,
        calls=list(parsed.calls) if is_parsed else [],
        parse_error="" if is_parsed else f"{parsed.reason}: {parsed.detail}",
    )
