"""The cases of `python -m tests.lab kernels`: each kernel at a shape, and torch's equivalent."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
from torch.nn import functional as F

from penstock.kernels import ops
from penstock.kernels.ops import Mxfp8

Run = Callable[[], object]
_NUM_COPIES = 8
"""Of inputs that the GPU's cache could hold: calls take them in turn, so that memory is read."""


class KernelCase(NamedTuple):
    """One measurement."""

    shape: str
    kernel: Run
    library: Run | None
    """The nearest that torch has; None where it has nothing."""
    num_bytes: int
    """Read and written, each once."""
    num_operations: int = 0
    """2 M N K of a product; else 0."""


def list_cases() -> list[tuple[str, KernelCase]]:
    """Return each kernel by name, at a large model's sizes."""
    tokens = 131072
    return [
        *_quantize_cases(_random(tokens, 7168).bfloat16()),
        *_routing_cases(_random(tokens, 384)),
        *_row_cases(tokens // 8),
        *_product_cases(),
        *_delta_cases(_random(tokens, 7168).bfloat16().flatten()),
    ]


def _quantize_cases(x: torch.Tensor) -> list[tuple[str, KernelCase]]:
    shape = "x".join(map(str, x.shape))
    bytes_in, codes = 2 * x.numel(), x.numel() + x.numel() // 32
    rows = ops.mxfp8_quantize_rows(x)

    def cast() -> torch.Tensor:
        return x.to(torch.float8_e4m3fn)

    def widen() -> torch.Tensor:
        return rows.codes.view(torch.float8_e4m3fn).to(torch.bfloat16)

    one = bytes_in + codes
    return [
        ("mxfp8_quantize_rows", KernelCase(shape, lambda: ops.mxfp8_quantize_rows(x), cast, one)),
        (
            "mxfp8_quantize_columns",
            KernelCase(shape, lambda: ops.mxfp8_quantize_columns(x), cast, one),
        ),
        (
            "mxfp8_quantize_both",
            KernelCase(shape, lambda: ops.mxfp8_quantize_both(x), cast, one + codes),
        ),
        ("mxfp8_dequantize", KernelCase(shape, lambda: ops.mxfp8_dequantize(rows), widen, one)),
    ]


def _routing_cases(logits: torch.Tensor) -> list[tuple[str, KernelCase]]:
    tokens = len(logits)
    chosen = ops.router_topk(logits, 8)
    routes = chosen.ids[: tokens // 8, None].expand(-1, 60, -1).contiguous()
    packed = ops.routes_pack(routes, 384)
    unpacked_copies, packed_copies = _copies(routes), _copies(packed)

    def topk() -> torch.Tensor:
        return logits.softmax(-1).topk(8, dim=-1).values

    num_bytes = 4 * logits.numel() + 6 * chosen.ids.numel() + 8 * tokens
    moved = 2 * routes.numel() + packed.numel()
    shape = f"{len(routes)}x60x8 of 384"
    return [
        (
            "router_topk",
            KernelCase(f"{tokens}x384", lambda: ops.router_topk(logits, 8), topk, num_bytes),
        ),
        (
            "router_topk replay",
            KernelCase(
                f"{tokens}x384",
                lambda: ops.router_topk(logits, 8, recorded=chosen.ids),
                topk,
                num_bytes + 2 * chosen.ids.numel(),
            ),
        ),
        (
            "routes_pack",
            KernelCase(
                shape,
                _in_turn([partial(ops.routes_pack, ids, 384) for ids in unpacked_copies]),
                None,
                moved,
            ),
        ),
        (
            "routes_unpack",
            KernelCase(
                shape,
                _in_turn([partial(ops.routes_unpack, each, 60, 8, 384) for each in packed_copies]),
                None,
                moved,
            ),
        ),
    ]


def _row_cases(rows: int) -> list[tuple[str, KernelCase]]:
    x, weight = _random(rows, 7168).bfloat16(), _random(7168).bfloat16()
    logits = _random(max(1, rows // 16), 163840)
    targets = torch.randint(0, 163840, (len(logits),), device=logits.device)
    slots, weights = _random(rows, 8, 7168).bfloat16(), _random(rows, 8)

    def combine() -> torch.Tensor:
        return torch.bmm(weights.bfloat16()[:, None], slots)[:, 0]

    return [
        (
            "rms_norm",
            KernelCase(
                f"{rows}x7168",
                lambda: ops.rms_norm(x, weight, 1e-6),
                lambda: F.rms_norm(x, (7168,), weight, 1e-6),
                4 * x.numel(),
            ),
        ),
        (
            "token_logprobs",
            KernelCase(
                f"{len(logits)}x163840",
                lambda: ops.token_logprobs(logits, targets),
                lambda: F.cross_entropy(logits, targets, reduction="none"),
                4 * logits.numel(),
            ),
        ),
        (
            "moe_combine",
            KernelCase(
                f"{rows}x8x7168",
                lambda: ops.moe_combine(slots, weights),
                combine,
                2 * slots.numel() + 2 * x.numel(),
            ),
        ),
    ]


def _product_cases() -> list[tuple[str, KernelCase]]:
    """Few rows, as in decoding; and experts with an eighth of the rows each."""
    depth, columns = 7168, 2048
    weight = _random(columns, depth).bfloat16()
    weights = _copies(weight)
    cases: list[tuple[str, KernelCase]] = []
    for rows in (1, 16, 64):
        x = _random(rows, depth).bfloat16()
        num_bytes = weight.element_size() * (x.numel() + weight.numel() + rows * columns)
        case = KernelCase(
            f"{rows}x{columns}x{depth}",
            _in_turn([partial(ops.matmul, x, each) for each in weights]),
            _in_turn([partial(F.linear, x, each) for each in weights]),
            num_bytes,
            2 * rows * columns * depth,
        )
        cases.append(("matmul", case))
    experts = 8
    x = _random(512, depth).bfloat16()
    return [*cases, ("mxfp8_grouped_matmul", _grouped_case(x, weight, experts))]


def _grouped_case(x: torch.Tensor, weight: torch.Tensor, experts: int) -> KernelCase:
    stacked = weight.expand(experts, -1, -1).contiguous()
    quantized: Mxfp8 = ops.mxfp8_quantize_rows(stacked)
    step = len(x) // experts
    offsets = torch.arange(experts + 1, dtype=torch.int32, device=x.device) * step

    def library() -> torch.Tensor:
        return torch.bmm(x.view(experts, step, -1), stacked.transpose(1, 2))

    codes = quantized.codes.numel() + quantized.scales.numel()
    rows, columns, depth = len(x), weight.shape[0], x.shape[1]
    return KernelCase(
        f"{experts} experts, {rows}x{columns}x{depth}",
        lambda: ops.mxfp8_grouped_matmul(x, quantized, offsets),
        library,
        codes + x.element_size() * rows * (depth + columns),
        2 * rows * columns * depth,
    )


def _delta_cases(base: torch.Tensor) -> list[tuple[str, KernelCase]]:
    is_changed = torch.rand(len(base), device=base.device) < 0.03
    target = torch.where(is_changed, -base, base)
    positions, values = ops.delta_changes(base, target)
    wide = positions.long()

    def changes() -> torch.Tensor:
        return target[(base != target).nonzero()[:, 0]]

    shape = f"{len(base)}, 3%"
    num_bytes = 4 * len(base) + 6 * len(positions)
    apply = partial(ops.delta_apply, base.clone(), positions, values)
    library = partial(base.clone().index_copy_, 0, wide, values)
    return [
        (
            "delta_changes",
            KernelCase(shape, lambda: ops.delta_changes(base, target), changes, num_bytes),
        ),
        ("delta_apply", KernelCase(shape, apply, library, 8 * len(positions))),
    ]


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda")


def _copies(tensor: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.clone() for _ in range(_NUM_COPIES)]


def _in_turn(runs: Sequence[Run]) -> Run:
    """Return what does the next of some runs each time it is called."""
    turns = cycle(runs)

    def run() -> object:
        return next(turns)()

    return run
