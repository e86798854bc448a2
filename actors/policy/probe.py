"""The probe: what a policy computes for a few fixed prompts, to compare engines with the trainer.

The trainer publishes its values with every version; an engine that took the version in computes
its own before it serves. Digests prove the weights that were written; the probe proves the ones
that are computed with: packed copies, compiled kernels and quantized experts included.

The value of a prompt is the log-probability of its likeliest next token, not of a fixed one: it is
continuous in the weights where the choice of the token is not. Prompts are independent of each
other, so an expert that rounding decides otherwise changes one value and no more.
"""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.actors.policy.model import Policy
from penstock.messages.errors import CorruptDataError

NUM_PROMPTS, NUM_TOKENS = 16, 8
PROBE_TOLERANCE = 1e-3
"""Largest difference of a value, in nats, that rounding explains."""
NUM_DIFFERING_MAX = 2
"""Prompts that may differ: near ties of a router fall one way here and another there."""


def probe_prompts(vocab_size: int) -> np.ndarray:
    """Return int32 [NUM_PROMPTS, NUM_TOKENS]: the same for every policy of this vocabulary."""
    shape = (NUM_PROMPTS, NUM_TOKENS)
    return np.random.default_rng(0).integers(0, vocab_size, shape, dtype=np.int32)


@torch.no_grad()
def probe_policy(policy: Policy) -> list[float]:
    """Compute the probe with a policy's own forward pass."""
    prompts = torch.from_numpy(probe_prompts(policy.config.vocab_size))
    output = policy(prompts.flatten().to(policy.device, torch.int64), [NUM_TOKENS] * NUM_PROMPTS)
    return greedy_logprobs(policy.logits(output.hidden[NUM_TOKENS - 1 :: NUM_TOKENS]))


def greedy_logprobs(logits: torch.Tensor) -> list[float]:
    """Return the log-probability of the likeliest token of each row [N, V]."""
    return torch.log_softmax(logits.float(), dim=-1).amax(dim=-1).tolist()


def check_probe(
    found: Sequence[float], expected: Sequence[float], tolerance: float, policy_version: int
) -> None:
    """Compare an engine's probe with the trainer's; without one there is nothing to compare.

    Args:
        found: The engine's values.
        expected: The trainer's; empty where the publisher gave none.
        tolerance: Largest difference, in nats, that counts as equal.
        policy_version: Of the weights, for the error.

    Raises:
        CorruptDataError: More than `NUM_DIFFERING_MAX` values differ.

    """
    if not expected:
        return
    off = [abs(ours - theirs) for ours, theirs in zip(found, expected, strict=True)]
    num_differing = sum(not value <= tolerance for value in off)
    if num_differing > NUM_DIFFERING_MAX:
        raise CorruptDataError(
            f"weights {policy_version}: {num_differing} of {len(off)} probe values differ from the "
            f"trainer's by more than {tolerance:g} nats, the most by {max(off):.3g}"
        )
