"""What is kept of an answered request: the tokens as they were sampled, never retokenized."""

import numpy as np

from penstock.actors.policy.parse import ParseFailure, parse_turn
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.gateway.generation import Generation
from penstock.gateway.keys import KeySpec
from penstock.messages.base import Array
from penstock.messages.feedback import InferenceRecorded
from penstock.messages.rollout import StopReason, Turn

VARIANT = "current"
"""There is one variant yet, chosen with certainty."""


def inference_record(
    generation: Generation, key: KeySpec, tokenizer: Tokenizer
) -> InferenceRecorded:
    """Return the record of a request that got at least one token."""
    sampled = generation.sampled
    assert sampled.token_ids, "a request without a token has no turn"
    return InferenceRecorded(
        request_id=generation.request_id,
        session_id=generation.session_id,
        key_id=key.key_id,
        training_consent=key.training_consent,
        variant=VARIANT,
        propensity=1.0,
        turn=_turn(generation, tokenizer),
        policy_version=sampled.min_policy_version,
        replica=sampled.replica,
    )


def _turn(generation: Generation, tokenizer: Tokenizer) -> Turn:
    sampled = generation.sampled
    parsed = parse_turn(tokenizer, sampled.token_ids)
    failed = isinstance(parsed, ParseFailure)
    return Turn(
        context_ids=_array(generation.context_ids, "int32"),
        token_ids=_array(sampled.token_ids, "int32"),
        behavior_logprobs=_array(sampled.logprobs, "float32"),
        routed_experts=sampled.routed_experts,
        version_spans=sampled.version_spans,
        stop_reason=sampled.stop_reason or StopReason.ABORTED,
        calls=[] if failed else list(parsed.calls),
        parse_error=f"{parsed.reason}: {parsed.detail}" if failed else "",
    )


def _array(values: list[int] | list[float], dtype: str) -> Array:
    array = np.asarray(values, dtype=np.dtype(dtype).newbyteorder("<"))
    return Array(dtype=dtype, shape=array.shape, data=array.tobytes())
