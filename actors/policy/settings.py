"""Bounds of the sampling settings that engines accept and trainers can reproduce."""

import math

from penstock.messages.task import TEMPERATURE_MIN, TOP_LOGPROBS_MAX, TOP_P_MIN, Sampling

TEMPERATURE_MAX = 100.0
_BOUNDS: dict[str, tuple[float, float]] = {
    "top_p": (TOP_P_MIN, 1.0),
    "top_k": (0, math.inf),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 10.0),
    "num_top_logprobs": (0, TOP_LOGPROBS_MAX),
    "num_tokens_max": (1, math.inf),
}
_BIAS_MAX = 100.0


def fault_of(sampling: Sampling, vocab_size: int) -> str:
    """Return an error text for the first setting that is out of bounds, or ""."""
    temperature = sampling.temperature
    if temperature != 0.0 and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX:
        text = f"0, or a number from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}"
        return f"temperature: expected {text}, got {temperature:g}"
    for name, (least, most) in _BOUNDS.items():
        value = getattr(sampling, name)
        # `not` in front, so that NaN is refused.
        if not least <= value <= most:
            return f"{name}: expected a number from {least:g} to {most:g}, got {value:g}"
    for token_id, value in sampling.logit_bias.items():
        if not 0 <= token_id < vocab_size:
            return f"logit_bias: expected token ids from 0 to {vocab_size - 1}, got {token_id}"
        if not -_BIAS_MAX <= value <= _BIAS_MAX:
            text = f"a number from {-_BIAS_MAX:g} to {_BIAS_MAX:g}, got {value:g}"
            return f"logit_bias[{token_id}]: expected {text}"
    prefix_ids = sampling.grammar.prefix_ids if sampling.grammar else ()
    if any(not 0 <= token_id < vocab_size for token_id in prefix_ids):
        return f"grammar.prefix_ids: expected token ids from 0 to {vocab_size - 1}"
    return ""
