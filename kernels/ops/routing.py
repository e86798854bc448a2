"""Routing of tokens to experts: choice or replay, packing of ids, and combination of outputs."""

import torch

from penstock.kernels.backend import KernelArgumentError, KernelBackend, Routing
from penstock.kernels.ops.backends import backend_for
from penstock.kernels.ops.checks import FLOATS, check_range, check_tensor, check_values
from penstock.kernels.reference.routing import bits_per_id

NUM_CHOSEN_MAX = 32
NUM_EXPERTS_MAX = 1024
_INTEGERS = (torch.uint8, torch.int16, torch.int32, torch.int64)


def router_topk(  # noqa: PLR0913 - the options are keywords
    logits: torch.Tensor,
    num_chosen: int,
    *,
    normalize: bool = True,
    recorded: torch.Tensor | None = None,
    plausibility_min: float = 0.0,
    backend: KernelBackend | None = None,
) -> Routing:
    """Choose K experts per token from float32 logits, or replay recorded choices.

    Experts are ranked by logit, with ties going to the lower id and NaN last. Scores are the
    softmax over all experts, summed in a fixed order, so they have the same bits on every backend
    and in any batch.

    Args:
        logits: Router logits float32 [T, E], E <= 1024. Sampler and trainer must both compute them
            in float32, or they choose different experts.
        num_chosen: Number of experts per token, K <= 32.
        normalize: Whether to divide the chosen scores by their sum, added in slot order.
        recorded: Expert ids [T, K] to replay, in slot order; a row that starts with -1 is routed
            freely.
        plausibility_min: Threshold for recorded experts, as a fraction of the lowest score among
            the router's own K. A recorded expert below it is replaced by the best expert that the
            token does not use yet (Composer 2, arXiv 2603.24477); 0 replays everything.
        backend: Backend; see `penstock.kernels.ops`.

    Raises:
        KernelArgumentError: A shape or dtype is wrong, or a recorded id is outside 0..E-1.

    """
    logits = check_tensor("logits", logits, (None, None), (torch.float32,))
    num_tokens, num_experts = logits.shape
    check_range("logits: number of experts", num_experts, 1, NUM_EXPERTS_MAX)
    check_range("num_chosen", num_chosen, 1, min(num_experts, NUM_CHOSEN_MAX))
    if recorded is not None:
        recorded = _checked_ids(recorded, (num_tokens, num_chosen), num_experts, -1, backend)
        # -1 is allowed only as the mark of a free row, which is in its first slot.
        is_missing = (recorded[:, :1] >= 0) & (recorded < 0)
        check_values(
            "recorded: -1 in a row that does not start so", is_missing.int(), 0, 0, backend
        )
    routing = Routing(
        torch.empty((num_tokens, num_chosen), dtype=torch.int16, device=logits.device),
        torch.empty((num_tokens, num_chosen), dtype=torch.float32, device=logits.device),
        torch.empty(num_tokens, dtype=torch.int32, device=logits.device),
        torch.empty(num_tokens, dtype=torch.int32, device=logits.device),
    )
    if num_tokens:
        chosen = backend_for(logits, backend)
        chosen.router_topk(logits, recorded, routing, normalize, float(plausibility_min))
    return routing


def routes_pack(
    routes: torch.Tensor, num_experts: int, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Pack expert ids [T, L, K] into ceil(log2 E) bits each -> uint8 [T, ceil(L*K*bits/8)].

    Each token starts on a byte boundary, so that sequences can be cut and joined. 60 layers with 8
    of 384 experts take 540 bytes. `penstock.kernels.route_segments` adds a checksum and the policy
    version.

    Raises:
        KernelArgumentError: There are not three dimensions, the ids are not integers, or one is
            outside 0..E-1.

    """
    check_range("num_experts", num_experts, 1, 1 << 15)
    if routes.dim() != 3:
        raise KernelArgumentError(f"routes: expected [T, L, K], got {list(routes.shape)}")
    ids = _checked_ids(routes.flatten(1), (None, None), num_experts, 0, backend)
    num_bytes = -(-ids.shape[1] * bits_per_id(num_experts) // 8)
    packed = torch.empty((ids.shape[0], num_bytes), dtype=torch.uint8, device=ids.device)
    if packed.numel():
        backend_for(ids, backend).routes_pack(ids, bits_per_id(num_experts), packed)
    return packed


def routes_unpack(
    packed: torch.Tensor,
    num_layers: int,
    num_chosen: int,
    num_experts: int,
    *,
    backend: KernelBackend | None = None,
) -> torch.Tensor:
    """Invert `routes_pack` -> int16 [T, L, K].

    Raises:
        KernelArgumentError: The width is not that of L x K ids of E experts.

    """
    width = bits_per_id(num_experts)
    num_bytes = -(-num_layers * num_chosen * width // 8)
    packed = check_tensor("packed", packed, (None, num_bytes), (torch.uint8,))
    shape = (packed.shape[0], num_layers * num_chosen)
    ids = torch.empty(shape, dtype=torch.int16, device=packed.device)
    if ids.numel():
        backend_for(packed, backend).routes_unpack(packed, width, ids)
    return ids.view(-1, num_layers, num_chosen)


def moe_combine(
    per_slot: torch.Tensor, weights: torch.Tensor, *, backend: KernelBackend | None = None
) -> torch.Tensor:
    """Sum experts' outputs [T, K, H] with weights float32 [T, K] in slot order -> [T, H].

    The sum is accumulated in float32 with fused multiply-adds and without atomics; the result has
    the dtype of `per_slot`.
    """
    per_slot = check_tensor("per_slot", per_slot, (None, None, None), FLOATS)
    weights = check_tensor("weights", weights, tuple(per_slot.shape[:2]), (torch.float32,))
    num_tokens, _, width = per_slot.shape
    out = torch.empty((num_tokens, width), dtype=per_slot.dtype, device=per_slot.device)
    if out.numel():
        backend_for(per_slot, backend).moe_combine(per_slot, weights, out)
    return out


def _checked_ids(
    ids: torch.Tensor,
    shape: tuple[int | None, ...],
    num_experts: int,
    lowest: int,
    backend: KernelBackend | None,
) -> torch.Tensor:
    ids = check_tensor("expert ids", ids, shape, _INTEGERS)
    check_values("expert ids", ids, lowest, num_experts - 1, backend)
    return ids.to(torch.int16)
