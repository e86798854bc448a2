"""What is kept of an answered request: the tokens as they were sampled, never retokenized."""

import numpy as np

from penstock.actors.policy.parse import ParseFailure, parse_turn
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.gateway.chat.generation import Generation
from penstock.gateway.keys import KeySpec
from penstock.kernels.arrays import to_array
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
        context_ids=to_array(np.asarray(generation.context_ids, np.int32)),
        token_ids=to_array(np.asarray(sampled.token_ids, np.int32)),
        behavior_logprobs=to_array(np.asarray(sampled.logprobs, np.float32)),
        route_segments=sampled.route_segments,
        arithmetic=sampled.arithmetic,
        version_spans=sampled.version_spans,
        stop_reason=sampled.stop_reason or StopReason.ABORTED,
        calls=[] if failed else list(parsed.calls),
        parse_error=f"{parsed.reason}: {parsed.detail}" if failed else "",
    )
