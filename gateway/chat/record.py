"""What is kept of an answered request: the tokens as they were sampled, never retokenized."""

from penstock.actors.policy.sampling import make_turn
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.gateway.chat.generation import Generation
from penstock.gateway.keys import KeySpec
from penstock.messages.feedback import InferenceRecorded

VARIANT = "current"
"""There is one variant yet, chosen with certainty."""


def inference_record(
    generation: Generation, key: KeySpec, tokenizer: Tokenizer
) -> InferenceRecorded:
    """Return the record of a request that got at least one token."""
    sampled = generation.sampled
    return InferenceRecorded(
        request_id=generation.request_id,
        session_id=generation.session_id,
        key_id=key.key_id,
        training_consent=key.training_consent,
        variant=VARIANT,
        propensity=1.0,
        turn=make_turn(tokenizer, generation.context_ids, sampled),
        policy_version=sampled.min_policy_version,
        replica=sampled.replica,
    )
