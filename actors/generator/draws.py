"""One token for each request of a step: shaped, drawn, pushed."""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from penstock.actors.generator.engine import InvalidRequestError, RequestFailedError
from penstock.actors.generator.request import GenerationRequest
from penstock.actors.generator.sampler import SamplingBatch, finite_rows

NO_NUMBERS = RequestFailedError("the logits of its context are no finite numbers")
Logits = np.ndarray | torch.Tensor
Sample = Callable[[Logits, SamplingBatch], tuple[list[int], list[float]]]


def draw(
    requests: Sequence[GenerationRequest], logits: Logits, sample: Sample
) -> list[Exception | None]:
    """Give each request its next token.

    Args:
        requests: M of them.
        logits: float32 [M, V]; overwritten.
        sample: the decoder's.

    Returns:
        Why a request got none: `NO_NUMBERS`, or an `InvalidRequestError` of its own grammar.

    """
    faults: list[Exception | None] = [None] * len(requests)
    is_finite = finite_rows(logits)
    if not is_finite.all():
        logits[~is_finite] = 0.0
    for index, request in enumerate(requests):
        if not is_finite[index]:
            faults[index] = NO_NUMBERS
        elif request.is_shaped:
            faults[index] = _try_shape(request, logits[index])
    batch = SamplingBatch(
        temperatures=[request.sampling.temperature for request in requests],
        uniforms=[request.uniforms[request.num_sampled] for request in requests],
    )
    token_ids, logprobs = sample(logits, batch)
    drawn = zip(requests, token_ids, logprobs, strict=True)
    for index, (request, token_id, logprob) in enumerate(drawn):
        if faults[index] is None:
            faults[index] = _try_push(request, token_id, logprob)
    return faults


def _try_shape(request: GenerationRequest, row: Logits) -> InvalidRequestError | None:
    try:
        request.shape(row if isinstance(row, torch.Tensor) else torch.from_numpy(row))
    except InvalidRequestError as error:
        return error
    return None


def _try_push(
    request: GenerationRequest, token_id: int, logprob: float
) -> InvalidRequestError | None:
    try:
        request.push(token_id, logprob)
    except InvalidRequestError as error:
        return error
    return None
