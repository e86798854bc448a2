"""The policy's operations that have a kernel: `kernels.ops` on CUDA, torch on a CPU.

Kernels are forward only, so the derivatives here are torch's formulas. What has no kernel in
float32 (products, attention) is torch's on every device.
"""

from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from penstock.kernels import ops
from penstock.kernels.decode.kernel import round_mxfp8
from penstock.kernels.reference.routing import replay_experts


class Chosen(NamedTuple):
    """Experts of T tokens: K each, of E."""

    ids: torch.Tensor
    """[T, K] int64, in slot order."""
    weights: torch.Tensor
    """[T, K], with a gradient to the logits."""
    scores: torch.Tensor
    """[T, E]."""
    flips: torch.Tensor
    """0-dim int64: how many recorded ids the router itself would not have chosen."""


class TakeValue(torch.autograd.Function):
    """The value of another implementation, with the gradient of this one."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `value`, of the shape of `own`."""
        return value.view_as(own).clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Hand the gradient to `own`."""
        return grad_outputs[0], None


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return ops.rms_norm(x, weight, eps)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grad_outputs
        x, weight = ctx.saved_tensors
        scale = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt()
        normed, weighted = x * scale, grad * weight
        grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
        return grad_x, (grad * normed).flatten(0, -2).sum(0), None


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits, targets)
        return ops.token_logprobs(logits, targets)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, targets = ctx.saved_tensors
        grad, at = grad_outputs[0].unsqueeze(1), targets.unsqueeze(1)
        grad_logits = logits.softmax(-1).mul_(-grad)
        return grad_logits.scatter_(1, at, grad_logits.gather(1, at) + grad), None


def has_kernels(tensor: torch.Tensor) -> bool:
    """Whether the operations here run as kernels on this tensor."""
    return tensor.is_cuda


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x**2) + eps) * weight: [..., H] and [H] -> [..., H]."""
    if has_kernels(x):
        return _RmsNorm.apply(x, weight, eps)
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probability of each target: [N, V] and [N] int64 -> [N] float32."""
    if has_kernels(logits):
        return _TokenLogprobs.apply(logits, targets)
    return -F.cross_entropy(logits.float(), targets, reduction="none")


def choose_experts(
    logits: torch.Tensor,
    num_chosen: int,
    *,
    normalize: bool,
    recorded: torch.Tensor | None,
    plausible: float,
) -> Chosen:
    """Choose experts by float32 logits [T, E], or replay recorded choices.

    Args:
        logits: of the router.
        num_chosen: K.
        normalize: whether the weights of a token's experts are scaled to sum to one.
        recorded: integers [T, K], or None; rows that start with `ROUTE_FREE` are routed freely.
        plausible: as `NumericsConfig` says.

    """
    scores = logits.softmax(-1)
    if has_kernels(logits):
        routing = ops.router_topk(
            logits,
            num_chosen,
            normalize=normalize,
            recorded=recorded,
            plausibility_min=plausible,
        )
        ids = routing.ids.long()
        weights = TakeValue.apply(_weights(scores, ids, normalize=normalize), routing.weights)
        return Chosen(ids, weights, scores, routing.num_mismatched.sum())
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
    """Sum [T, K, d] weighted by [T, K] over K in slot order -> [T, d]; without a gradient."""
    if has_kernels(per_slot):
        return ops.moe_combine(per_slot, weights)
    total = per_slot[:, 0] * weights[:, 0:1]
    for slot in range(1, weights.shape[1]):
        total.addcmul_(per_slot[:, slot], weights[:, slot : slot + 1])
    return total


def rounded_mxfp8(values: torch.Tensor) -> torch.Tensor:
    """Round float32 [..., M, K] along K to the values of MXFP8; without a gradient."""
    if has_kernels(values):
        return ops.mxfp8_dequantize(ops.mxfp8_quantize_rows(values), torch.float32)
    rounded = values.clone(memory_format=torch.contiguous_format)
    round_mxfp8(rounded.numpy())
    return rounded
