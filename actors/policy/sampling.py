"""What a generator sampled: chunks joined into a turn."""

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
    """The replies ended before the turn did, or are not those of a generator."""


class SampledTokens(msgspec.Struct, kw_only=True):
    """What has been sampled of one turn so far.

    Shapes: N tokens; `token_ids` [N], `logprobs` [N] (behavior logprobs).
    """

    token_ids: list[int] = []
    logprobs: list[float] = []
    version_spans: list[VersionSpan] = []
    route_segments: list[bytes] = []
    support: list[bytes] = []
    """Sealed (`kernels.support`), chunk by chunk; empty where nothing is left out."""
    forced: list[tuple[int, int]] = []
    """Spans of tokens that were the only one allowed."""
    top: list[list[tuple[int, float]]] = []
    """[N]: ids and logprobs of the likeliest tokens, where they were asked for."""
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
        self._extend_forced(chunk.forced)
        self.token_ids += ids
        self.logprobs += logprobs
        if chunk.support:
            self.support.append(chunk.support)
        if chunk.top_ids is not None and chunk.top_logprobs is not None:
            rows = zip(from_array(chunk.top_ids), from_array(chunk.top_logprobs), strict=True)
            self.top += [list(zip(*map(np.ndarray.tolist, row), strict=True)) for row in rows]
        self.replica = chunk.replica or self.replica
        self.route_segments = chunk.route_segments or self.route_segments
        self.arithmetic = chunk.arithmetic
        self.stop_reason = chunk.stop_reason
        if ids:
            self._extend_spans(chunk.policy_version, len(ids))
        return ids

    def _extend_forced(self, spans: Sequence[tuple[int, int]]) -> None:
        """Append a chunk's spans; call before its tokens are added."""
        offset = len(self.token_ids)
        for start, end in spans:
            first = offset + start
            if self.forced and self.forced[-1][1] == first:
                first = self.forced.pop()[0]
            self.forced.append((first, offset + end))

    def _extend_spans(self, policy_version: int, num_tokens: int) -> None:
        if self.version_spans and self.version_spans[-1].policy_version == policy_version:
            num_tokens += self.version_spans.pop().num_tokens
        span = VersionSpan(policy_version=policy_version, num_tokens=num_tokens)
        self.version_spans.append(span)


def recorded(sampling: Sampling) -> Sampling:
    """Return what the log keeps of a turn's settings: all but a grammar's text.

    What the grammar allowed is in the turn's support, token by token; its text is the user's.
    """
    grammar = sampling.grammar
    if grammar is None or not grammar.text:
        return sampling
    digest = blake3(grammar.text.encode()).hexdigest()
    return msgspec.structs.replace(sampling, grammar=Grammar(blake3=digest))


def with_exploration(sampling: Sampling, temperature: float) -> Sampling:
    """Return a greedy request's settings at another temperature.

    For keys whose owner lets the gateway do so: many agents always send temperature 0, and a turn
    drawn at 0 is never trained.
    """
    return msgspec.structs.replace(sampling, temperature=temperature)


def make_turn(
    chat: ChatFormat,
    context_ids: Sequence[int],
    sampled: SampledTokens,
    tools: OfferedTools,
    sampling: Sampling,
) -> Turn:
    """Parse what was sampled after `context_ids` by `sampling` into a turn of a token or more."""
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
        sampling=recorded(sampling),
        support=sampled.support,
        forced=sampled.forced,
        parse_error="" if is_parsed else f"{parsed.reason}: {parsed.detail}",
    )
