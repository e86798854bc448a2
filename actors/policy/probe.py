"""The probe: results for a few fixed prompts, to verify that an engine computes like the trainer.

The trainer publishes its values with every version, and an engine computes its own before it serves
that version. Digests verify the weights that were written. The probe verifies the weights that are
used, including packed copies, compiled kernels and quantized experts.

The value of a prompt is the log-probability of its most likely next token. Unlike the choice of the
token, this value is continuous in the weights. Prompts are independent of each other, so an expert
choice that rounding flips changes only one value.
"""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.actors.policy.model import Policy
from penstock.messages.errors import CorruptDataError

NUM_PROMPTS, NUM_TOKENS = 16, 8
PROBE_TOLERANCE = 1e-3
"""Largest difference of a value, in nats, that rounding can explain."""
NUM_DIFFERING_MAX = 2
"""Maximum prompts that may differ, since rounding may flip a near tie in a router."""


def probe_prompts(vocab_size: int) -> np.ndarray:
    """Return the prompts for a vocabulary size, int32 [NUM_PROMPTS, NUM_TOKENS]."""
    # A fixed seed: trainer and engines must use the same prompts.
    shape = (NUM_PROMPTS, NUM_TOKENS)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


@torch.no_grad()
def probe_policy(policy: Policy) -> list[float]:
    """Compute the probe with a policy's own forward pass."""
    prompts = torch.from_numpy(probe_prompts(policy.config.vocab_size))
    output = policy(prompts.flatten().to(policy.device, torch.int64), [NUM_TOKENS] * NUM_PROMPTS)
    # The last position of each prompt.
    return greedy_logprobs(policy.logits(output.hidden[NUM_TOKENS - 1 :: NUM_TOKENS]))


def greedy_logprobs(logits: torch.Tensor) -> list[float]:
    """Return the log-probability of the most likely token of each row of [N, V]."""
    return torch.log_softmax(logits.float(), dim=-1).amax(dim=-1).tolist()


def check_probe(
    found: Sequence[float], expected: Sequence[float], tolerance: float, policy_version: int
) -> None:
    """Compare an engine's probe values with the trainer's.

    Args:
        found: Values of the engine.
        expected: Values of the trainer; if empty, nothing is compared.
        tolerance: Largest difference that counts as equal, in nats.
        policy_version: Version of the weights, for the error.

    Raises:
        CorruptDataError: More than `NUM_DIFFERING_MAX` values differ.

    """
    if not expected:
        return
    off = [abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)]
    # `not <=` rather than `>`, so that NaN counts as different.
    num_differing = sum(not value <= tolerance for value in off)
    if num_differing > NUM_DIFFERING_MAX:
        raise CorruptDataError(
            f"weights {policy_version}: {num_differing} of {len(off)} probe values differ from the "
            f"trainer's by more than {tolerance:g} nats, the most by {max(off):.3g}"
        )
