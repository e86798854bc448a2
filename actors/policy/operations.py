"""Operations of the policy that training and the torch decoder share."""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from penstock.kernels.decode.kernel import round_mxfp8
from penstock.kernels.reference.routing import replay_experts


class Chosen(NamedTuple):
    """Chosen experts of T tokens: K of E experts each."""

    ids: torch.Tensor
    """Expert ids in slot order, int64 [T, K]."""
    weights: torch.Tensor
    """Weights of the experts, [T, K], with a gradient to the logits."""
    scores: torch.Tensor
    """Router probabilities, [T, E]."""
    flips: torch.Tensor
    """Number of replayed ids that the router itself would not have chosen, int64 scalar."""


class TakeValue(torch.autograd.Function):
    """Value of another implementation with the gradient of this one."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a copy of `value` in the shape of `own`."""
        return value.view_as(own).clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Pass the gradient to `own`."""
        return grad_outputs[0], None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight: [..., H] and [H] -> [..., H]."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the log-probability of each target: [N, V] and [N] int64 -> [N] float32."""
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    normalize: bool,
    recorded: torch.Tensor | None,
    plausible: float,
) -> Chosen:
    """Choose experts by router logits, or replay recorded choices.

    Args:
        logits: Router logits, float32 [T, E].
        num_chosen: Number of experts per token, K.
        normalize: Whether the weights of a token's experts are scaled to sum to one.
        recorded: Expert ids to replay, integers [T, K], or None; rows that start with `ROUTE_FREE`
            are routed freely.
        plausible: Threshold for replayed experts, as in `NumericsConfig`.

    """
    scores = logits.softmax(-1)
    # The choice itself has no gradient, only the weights of the chosen experts.
    ids = scores.detach().topk(num_chosen, dim=-1).indices
    flips = ids.new_zeros(())
    if recorded is not None:
        choice = replay_experts(ids, scores.detach(), recorded, plausible)
        ids, flips = choice.ids, choice.num_mismatched.sum()
    return Chosen(ids, _weights(scores, ids, normalize=normalize), scores, flips)


def _weights(scores: torch.Tensor, ids: torch.Tensor, *, normalize: bool) -> torch.Tensor:
    weights = scores.gather(1, ids)
    return weights / weights.sum(-1, keepdim=True) if normalize else weights


def combine(per_slot: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum [T, K, d] weighted by [T, K] over K -> [T, d]; has no gradient."""
    # In slot order: the order of a float sum decides its bits.
    total = per_slot[:, 0] * weights[:, 0:1]
    for slot in range(1, weights.shape[1]):
        total.addcmul_(per_slot[:, slot], weights[:, slot : slot + 1])
    return total


def rounded_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """Round float32 [..., M, K] along K to the values of MXFP8; has no gradient."""
    rounded = values.clone(memory_format=torch.contiguous_format)
    round_mxfp8(rounded.numpy())
    return rounded
