"""The probe: results for a few fixed prompts, to verify that an engine computes like the trainer.

The trainer publishes its values with every version, and an engine computes its own before it serves
that version. Digests verify the weights that were written. The probe verifies the weights that are
used, including packed copies, compiled kernels and quantized experts.

The value of a prompt is the log-probability of its most likely next token. Unlike the choice of the
token, this value is continuous in the weights. Prompts are independent of each other, so an expert
choice that rounding flips changes only one value.

An adapter that never arrives changes little at first, so that its values come with those of the
base alone. What an engine's values may differ by is then small beside the adapter's effect, and
beside the change since the version that the engine had before: a missing or old adapter, or one
with another scale, is refused with the version.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from penstock.actors.policy.model import Policy
from penstock.messages.errors import CorruptDataError

NUM_PROMPTS, NUM_TOKENS = 16, 8
PROBE_TOLERANCE = 1e-3
"""Largest difference of a value, in nats, that rounding can explain."""
_ROUNDING_NATS = 2e-5
"""Root mean square of the differences that the order of float32 sums explains."""
_SHARE_MAX = 0.25
"""Largest difference beside an adapter's effect, or its change: a scale that is off by more."""
NUM_DIFFERING_MAX = 2
"""Maximum prompts that may differ, since rounding may flip a near tie in a router."""


def probe_prompts(vocab_size: int) -> np.ndarray:
    """Return the prompts for a vocabulary size, int32 [NUM_PROMPTS, NUM_TOKENS]."""
    # A fixed seed: trainer and engines must use the same prompts.
    shape = (NUM_PROMPTS, NUM_TOKENS)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


@torch.no_grad()
def probe_policy(policy: Policy) -> list[float]:
    """Compute the probe with a policy's own forward pass.

    Returns:
        A value of each prompt; of a policy with adapters, then those without.

    """
    found = _values(policy)
    if policy.config.adapter is not None:
        policy.set_adapter_scale(0.0)
        found += _values(policy)
        policy.set_adapter_scale(policy.config.adapter.scale)
    return found


def _values(policy: Policy) -> list[float]:
    prompts = torch.from_numpy(probe_prompts(policy.config.vocab_size))
    output = policy(prompts.flatten().to(policy.device, torch.int64), [NUM_TOKENS] * NUM_PROMPTS)
    # The last position of each prompt.
    return greedy_logprobs(policy.logits(output.hidden[NUM_TOKENS - 1 :: NUM_TOKENS]))


def greedy_logprobs(logits: torch.Tensor) -> list[float]:
    """Return the log-probability of the most likely token of each row of [N, V]."""
    return torch.log_softmax(logits.float(), dim=-1).amax(dim=-1).tolist()


def check_probe(
    found: Sequence[float],
    expected: Sequence[float],
    tolerance: float,
    policy_version: int,
    before: Sequence[float] = (),
) -> None:
    """Compare an engine's probe values with the trainer's.

    Args:
        found: Values of the engine.
        expected: Values of the trainer, as `probe_policy` returns them; if empty, nothing is
            compared.
        tolerance: Largest difference that counts as equal, in nats.
        policy_version: Version of the weights, for the error.
        before: What was expected of the version that the engine had before.

    Raises:
        CorruptDataError: More than `NUM_DIFFERING_MAX` values differ, or those of an adapter are
            not near enough to tell it from none, or from the one before.

    """
    if not expected:
        return
    expected, base = expected[:NUM_PROMPTS], expected[NUM_PROMPTS:]
    off = [abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)]
    # `not <=` rather than `>`, so that NaN counts as different.
    num_differing = sum(not value <= tolerance for value in off)
    if num_differing > NUM_DIFFERING_MAX:
        raise CorruptDataError(
            f"weights {policy_version}: {num_differing} of {len(off)} probe values differ from the "
            f"trainer's by more than {tolerance:g} nats, the most by {max(off):.3g}"
        )
    if not base:
        return
    # A larger tolerance says that one of the two computes in bfloat16.
    floor = _ROUNDING_NATS if tolerance <= PROBE_TOLERANCE else tolerance
    # Without the prompts that a flip in a router may explain.
    kept = sorted(range(NUM_PROMPTS), key=off.__getitem__)[: NUM_PROMPTS - NUM_DIFFERING_MAX]
    for what, other in (("has", base), ("changed", before[:NUM_PROMPTS])):
        if not other:
            continue
        share = _SHARE_MAX * _rms([expected[i] - other[i] for i in kept])
        if not _rms([off[i] for i in kept]) <= max(floor, share):
            raise CorruptDataError(
                f"weights {policy_version}: probe values differ from the trainer's by "
                f"{_rms([off[i] for i in kept]):.3g} nats (rms), more than {_SHARE_MAX:.0%} of the "
                f"effect that the adapter {what}: it is missing, old or has another scale"
            )


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
