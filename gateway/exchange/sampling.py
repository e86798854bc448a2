"""How a reply is drawn: the wishes of a client as the settings of the engine, and its grammar."""

from typing import Any

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.grammars import grammar_for_calls, grammar_for_schema
from penstock.actors.policy.chat.schemas import GrammarError
from penstock.gateway.conversation import ChoiceMode, LiveRequest
from penstock.gateway.errors import invalid
from penstock.messages.task import Grammar, Sampling

_ANY_OBJECT: dict[str, Any] = {"type": "object"}


def sampling_of(
    request: LiveRequest, chat_format: ChatFormat, num_tokens_max: int, seed: int
) -> Sampling:
    """Return how a request's replies are drawn.

    Args:
        request: The request.
        chat_format: The policy's.
        num_tokens_max: Of one reply.
        seed: Where the request names none.

    Raises:
        ApiError: 400, the format cannot do what is asked, or a bias is of no token.

    """
    wishes = request.sampling
    stops = [] if wishes.ignores_end else list(chat_format.stop_ids)
    stops += wishes.stop_token_ids
    if not request.allows_parallel_calls and request.offered:
        if chat_format.call_end_id is None:
            text = "not supported by this model's chat format; leave it out or give true"
            raise invalid(text, "parallel_tool_calls")
        stops.append(chat_format.call_end_id)
    size = chat_format.tokenizer.vocab_size
    for name, ids in (("logit_bias", wishes.logit_bias), ("stop_token_ids", wishes.stop_token_ids)):
        if not all(0 <= one < size for one in ids):
            raise invalid(f"expected token ids from 0 to {size - 1}", name)
    return Sampling(
        temperature=1.0 if wishes.temperature is None else wishes.temperature,
        top_p=1.0 if wishes.top_p is None else wishes.top_p,
        top_k=max(0, wishes.top_k or 0),
        min_p=wishes.min_p or 0.0,
        presence_penalty=wishes.presence_penalty or 0.0,
        frequency_penalty=wishes.frequency_penalty or 0.0,
        repetition_penalty=wishes.repetition_penalty or 1.0,
        logit_bias=wishes.logit_bias,
        grammar=_grammar(request, chat_format),
        num_top_logprobs=request.num_top_logprobs,
        num_tokens_max=num_tokens_max,
        seed=seed if wishes.seed is None else wishes.seed,
        stop_token_ids=tuple(stops),
    )


def _grammar(request: LiveRequest, chat_format: ChatFormat) -> Grammar | None:
    """Return what a reply may say, where the client holds it to a form.

    Raises:
        ApiError: 400, a schema, or a chat format, that no grammar can be made of.

    """
    tools = [tool.schema | {"strict": tool.is_strict} for tool in request.offered.values()]
    choice, parallel = request.tool_choice, request.allows_parallel_calls
    schema = request.response_format.json_schema or _ANY_OBJECT
    answer = schema if request.response_format.is_json else None
    try:
        if choice.mode is ChoiceMode.REQUIRED:
            name = choice.name or "required"
            return grammar_for_calls(chat_format, tools, name, parallel=parallel)
        if tools and (answer is not None or any(tool["strict"] for tool in tools)):
            return grammar_for_calls(chat_format, tools, parallel=parallel, answer=answer)
        if answer is not None:
            return grammar_for_schema(answer, where="response_format")
    except GrammarError as error:
        place, _, text = str(error).partition(": ")
        raise invalid(text or str(error), place if text else None) from error
    return None
