"""Joins the chunks that a generator sampled into a turn."""

from collections.abc import Sequence

import msgspec
import numpy as np
from blake3 import blake3

from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParseFailure
from penstock.kernels.arrays import from_array, to_array
from penstock.messages.errors import BusError
from penstock.messages.generation import TokensSampled
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Grammar, Sampling


class BrokenTurnError(BusError):
    """The replies ended before the turn did, or are not valid replies of a generator."""


class SampledTokens(msgspec.Struct, kw_only=True):
    """The N tokens sampled for one turn so far."""

    token_ids: list[int] = []
    """Sampled ids, [N]."""
    logprobs: list[float] = []
    """Behavior logprobs, [N]."""
    version_spans: list[VersionSpan] = []
    route_segments: list[bytes] = []
    support: list[bytes] = []
    """Serialized supports (`kernels.support`) of each chunk; empty if all tokens could be drawn."""
    forced: list[tuple[int, int]] = []
    """Spans of tokens that were the only one allowed, as [start, end)."""
    top: list[list[tuple[int, float]]] = []
    """Ids and logprobs of the most likely tokens at each position, [N], if requested."""
    arithmetic: str = ""
    stop_reason: StopReason | None = None
    replica: str = ""

    @property
    def min_policy_version(self) -> int:
        """Oldest version that sampled a token; -1 before the first token."""
        return min((span.policy_version for span in self.version_spans), default=-1)

    def add(self, chunk: TokensSampled) -> list[int]:
        """Append a chunk and return its token ids.

        Raises:
            BrokenTurnError: The chunk does not have one logprob per token.

        """
        ids: list[int] = from_array(chunk.token_ids).tolist()
        logprobs: list[float] = from_array(chunk.behavior_logprobs).tolist()
        if len(ids) != len(logprobs):
            raise BrokenTurnError(
                f"expected {len(ids)} logprobs for as many tokens, got {len(logprobs)}"
            )
        self._extend_forced(chunk.forced)
        self.token_ids += ids
        self.logprobs += logprobs
        if chunk.support:
            self.support.append(chunk.support)
        if chunk.top_ids is not None and chunk.top_logprobs is not None:
            rows = zip(from_array(chunk.top_ids), from_array(chunk.top_logprobs), strict=True)
            self.top += [list(zip(*map(np.ndarray.tolist, row), strict=True)) for row in rows]
        self.replica = chunk.replica or self.replica
        # Only the last chunk carries routes.
        self.route_segments = chunk.route_segments or self.route_segments
        self.arithmetic = chunk.arithmetic
        self.stop_reason = chunk.stop_reason
        if ids:
            self._extend_spans(chunk.policy_version, len(ids))
        return ids

    def _extend_forced(self, spans: Sequence[tuple[int, int]]) -> None:
        """Append the spans of a chunk; call this before adding its tokens."""
        offset = len(self.token_ids)
        for start, end in spans:
            first = offset + start
            # A span that continues in the next chunk stays one span.
            if self.forced and self.forced[-1][1] == first:
                first = self.forced.pop()[0]
            self.forced.append((first, offset + end))

    def _extend_spans(self, policy_version: int, num_tokens: int) -> None:
        if self.version_spans and self.version_spans[-1].policy_version == policy_version:
            num_tokens += self.version_spans.pop().num_tokens
        span = VersionSpan(policy_version=policy_version, num_tokens=num_tokens)
        self.version_spans.append(span)


def recorded(sampling: Sampling) -> Sampling:
    """Return a turn's settings for the log, with the grammar's text replaced by its digest.

    The turn's support has what the grammar allowed at each token, and the text may be private.
    """
    grammar = sampling.grammar
    if grammar is None or not grammar.text:
        return sampling
    digest = blake3(grammar.text.encode()).hexdigest()
    return msgspec.structs.replace(sampling, grammar=Grammar(blake3=digest))


def with_exploration(sampling: Sampling, temperature: float) -> Sampling:
    """Return a greedy request's settings with another temperature.

    Only for API keys whose owner allows it: many agents always send temperature 0, and turns
    sampled at 0 cannot be trained on.
    """
    return msgspec.structs.replace(sampling, temperature=temperature)


def make_turn(
    chat: ChatFormat,
    context_ids: Sequence[int],
    sampled: SampledTokens,
    tools: OfferedTools,
    sampling: Sampling,
) -> Turn:
    """Parse sampled tokens into a turn.

    Args:
        chat: Chat format of the policy.
        context_ids: All ids before the turn.
        sampled: Sampled tokens, at least one.
        tools: Tools that the assistant may call.
        sampling: Settings with which the tokens were sampled.

    """
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
        # None if the turn was cut off before its last chunk.
        stop_reason=sampled.stop_reason or StopReason.ABORTED,
        calls=list(parsed.calls) if is_parsed else [],
        sampling=recorded(sampling),
        support=sampled.support,
        forced=sampled.forced,
        parse_error="" if is_parsed else f"{parsed.reason}: {parsed.detail}",
    )
