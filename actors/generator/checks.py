"""What every engine refuses."""

from collections.abc import Collection

import numpy as np

from penstock.actors.generator.engine import (
    ContextLengthError,
    EngineHealth,
    EngineNotReadyError,
    InvalidRequestError,
)
from penstock.actors.generator.sampler import GrammarMasks, TurnGrammar
from penstock.actors.policy.settings import fault_of
from penstock.messages.errors import QueueFullError
from penstock.messages.task import Sampling


def check_ready(
    health: EngineHealth, request_id: str, in_flight: Collection[str], num_requests_max: int
) -> None:
    """Check that an engine can take one more request.

    Raises:
        EngineNotReadyError: No weights, or not running.
        InvalidRequestError: It is in flight already.
        QueueFullError: As many are in flight as may be.

    """
    if not health.ready:
        raise EngineNotReadyError(f"no weights, or not running {health.error}".rstrip())
    if request_id in in_flight:
        raise InvalidRequestError(f"request_id {request_id!r} is in flight already")
    if len(in_flight) >= num_requests_max:
        raise QueueFullError(f"{len(in_flight)} requests are in flight, the most allowed")


def check_request(  # noqa: PLR0913 - a request, and what bounds it
    token_ids: np.ndarray,
    sampling: Sampling,
    routes_from: int,
    num_resumed: int,
    *,
    vocab_size: int,
    num_tokens_max: int,
) -> None:
    """Check a request; see `Engine.generate`.

    Raises:
        ContextLengthError: The prompt leaves no room for a token.
        InvalidRequestError: Anything else that no retry helps.

    """
    length = len(token_ids)
    if not 1 <= length < num_tokens_max:
        raise ContextLengthError(length, num_tokens_max - 1)
    if not 0 <= int(np.min(token_ids)) <= int(np.max(token_ids)) < vocab_size:
        raise InvalidRequestError(f"token_ids must lie in 0..{vocab_size - 1}")
    if not 0 <= routes_from < length:
        raise InvalidRequestError(f"routes_from must lie in 0..{length - 1}, not {routes_from}")
    if fault := fault_of(sampling, vocab_size):
        raise InvalidRequestError(fault)
    if not 0 <= num_resumed < length:
        raise InvalidRequestError(f"num_resumed: expected 0..{length - 1}")


async def open_grammar(sampling: Sampling, grammars: GrammarMasks | None) -> TurnGrammar | None:
    """Return the grammar of a request at its beginning, or None if it has none.

    Raises:
        InvalidRequestError: It does not compile within its limits, or is only a digest.

    """
    if sampling.grammar is None:
        return None
    if grammars is None or not sampling.grammar.text:
        raise InvalidRequestError("sampling.grammar: expected the text of one that is known")
    return await grammars.open(sampling.grammar.text)
