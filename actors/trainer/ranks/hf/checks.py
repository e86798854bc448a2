"""Checks of a model before training: its log-probabilities, and the names of its published tensors.

An untested architecture may attend differently, bound its logits, or keep a state. Instead of
listing what works, each model computes a few tokens twice: as transformers does, one sequence at a
time, and as a rank does, in a packed tree.
"""

from collections.abc import Mapping, Sequence

import torch
from transformers import PreTrainedModel

from penstock.actors.policy.hf.config import ModelFormatError
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.ranks.hf.attention import NAME

_LENGTHS, _PARENTS = (20, 7, 9, 16), (-1, 0, 0, -1)
_CHAINS = ((0, 1), (0, 2), (3,))
"""The pieces of each sequence."""
_NATS_MAX = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""Largest difference of a log-probability that the order of sums explains, by dtype."""
_SHARE_MAX = 0.1
"""Positions that may differ by more: rounding flips near ties in routers."""


@torch.no_grad()
def reference_logprobs(model: PreTrainedModel, device: torch.device) -> torch.Tensor:
    """Return transformers' own log-probabilities of the check's tokens, float32 [N, V]."""
    pieces = _tokens(model.config.vocab_size).split(_LENGTHS)
    model.set_attn_implementation("eager")
    found = []
    for chain in _CHAINS:
        ids = torch.cat([pieces[i] for i in chain]).to(device)
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        found.append(logits.float().log_softmax(-1))
    model.set_attn_implementation(NAME)
    return torch.cat(found)


@torch.no_grad()
def check_policy(policy: Policy, expected: torch.Tensor, model_type: str) -> None:
    """Check that a policy computes what `reference_logprobs` returned.

    Raises:
        ModelFormatError: It does not; the error names the architecture.

    """
    ids = _tokens(policy.config.vocab_size).to(policy.device)
    output = policy(ids, _LENGTHS, None, _PARENTS)
    found = policy.logits(output.hidden).float().log_softmax(-1)
    rows = torch.arange(len(ids), device=ids.device).split(_LENGTHS)
    found = torch.cat([found[rows[i]] for chain in _CHAINS for i in chain])
    bound = _NATS_MAX[output.hidden.dtype]
    # `not <=` rather than `>`, so that NaN counts as different.
    is_off = ~((found - expected).abs().amax(-1) <= bound)
    if float(is_off.float().mean()) > _SHARE_MAX:
        raise ModelFormatError(
            f"model_type {model_type}: expected the log-probabilities of transformers within "
            f"{bound:g} nats, got others at {int(is_off.sum())} of {len(is_off)} positions: ranks "
            "do not compute this architecture"
        )


def check_names(
    published: Mapping[str, Sequence[int]], stored: Mapping[str, Sequence[int]], model_type: str
) -> None:
    """Check that the folder has all published tensors; it may have more, such as MTP's.

    Raises:
        ModelFormatError: Some are missing; the error names them.

    """
    missing = [n for n, shape in published.items() if list(stored.get(n, ())) != list(shape)]
    if missing:
        raise ModelFormatError(
            f"model_type {model_type}: expected {len(missing)} tensors in the model's folder, with "
            f"the shapes of its config.json, e.g. {', '.join(sorted(missing)[:3])}"
        )


def _tokens(vocab_size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocab_size, (sum(_LENGTHS),), generator=generator)
