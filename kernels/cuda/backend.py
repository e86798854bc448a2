"""CUDA backend: grid sizes and arguments of each kernel."""

import numpy as np
import torch

from penstock.kernels.backend import KernelArgumentError, Mxfp8, Routing
from penstock.kernels.cuda.launch import Launch

Tensor = torch.Tensor
_THREADS = 256
_ROUTER_WARPS, _NORM_WARPS, _LOGIT_THREADS = 4, 8, 512
_TILE_COLUMNS, _MX_BLOCK = 256, 32
_GEMM_TILE, _GEMM_THREADS = 64, 128
_CHANGES_TILE = 4096
# Target number of blocks of a matrix product: two per multiprocessor of an H200.
_NUM_BLOCKS_AIM = 264


class CudaBackend:
    """Backend that launches CUDA kernels."""

    defers_checks = True

    def __init__(self, launch: Launch, device: str) -> None:
        """Set the function that launches kernels and the device type of its tensors."""
        self._launch = launch
        self.device = device

    def mxfp8_quantize(self, x: Tensor, rows: Mxfp8 | None, columns: Mxfp8 | None) -> None:
        """See `KernelBackend`."""
        num_rows, width = x.shape
        if columns is None:
            assert rows is not None
            # Without columns there is no need for a tile in shared memory.
            num_halves = x.numel() // 16
            grid = (_ceil(num_halves, _THREADS), 1)
            name = f"quantize.mxfp8_rows_{_dtype(x)}"
            self._launch(name, grid, _THREADS, x, *rows, np.int64(num_halves))
            return
        grid = (_ceil(width, _TILE_COLUMNS), num_rows // _MX_BLOCK)
        name = f"quantize.mxfp8_tile_{_dtype(x)}"
        self._launch(name, grid, _THREADS, x, *(rows or (None, None)), *columns, np.int64(width))

    def mxfp8_dequantize(self, quantized: Mxfp8, out: Tensor) -> None:
        """See `KernelBackend`."""
        by_rows = quantized.scales.shape[0] == out.shape[0]
        name = f"quantize.mxfp8_dequantize_{'rows' if by_rows else 'columns'}_{_dtype(out)}"
        num_groups = out.numel() // 16
        sizes = (np.int64(num_groups), np.int64(out.shape[1]))
        self._launch(name, (_ceil(num_groups, _THREADS), 1), _THREADS, *quantized, out, *sizes)

    def router_topk(
        self,
        logits: Tensor,
        recorded: Tensor | None,
        routing: Routing,
        normalize: bool,
        plausibility_min: float,
    ) -> None:
        """See `KernelBackend`."""
        num_tokens, num_experts = logits.shape
        # A warp holds 128 experts per round in registers; the number of rounds is compiled in.
        rounds = next(r for r in (1, 2, 4, 8) if num_experts <= r * 128)
        self._launch(
            f"routing.router_topk_{rounds}",
            (_ceil(num_tokens, _ROUTER_WARPS), 1),
            32 * _ROUTER_WARPS,
            *(logits, recorded, *routing),
            *(np.int64(num_tokens), np.int32(num_experts), np.int32(routing.ids.shape[1])),
            *(np.int32(normalize), np.float32(plausibility_min)),
        )

    def routes_pack(self, ids: Tensor, width: int, packed: Tensor) -> None:
        """See `KernelBackend`."""
        grid = (_ceil(len(ids) * _ceil(packed.shape[1], 4), _THREADS), 1)
        sizes = _route_sizes(ids, packed, width)
        self._launch("routing.routes_pack", grid, _THREADS, ids, packed, *sizes)

    def routes_unpack(self, packed: Tensor, width: int, ids: Tensor) -> None:
        """See `KernelBackend`."""
        grid = (_ceil(ids.numel(), _THREADS), 1)
        sizes = _route_sizes(ids, packed, width)
        self._launch("routing.routes_unpack", grid, _THREADS, packed, ids, *sizes)

    def moe_combine(self, per_slot: Tensor, weights: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        num_tokens, num_chosen, width = per_slot.shape
        grid = (_ceil(num_tokens * _ceil(width, 4), _THREADS), 1)
        sizes = (np.int64(num_tokens), np.int32(num_chosen), np.int64(width))
        name = f"rows.moe_combine_{_dtype(out)}"
        self._launch(name, grid, _THREADS, per_slot, weights, out, *sizes)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        """See `KernelBackend`."""
        grid = (_ceil(x.shape[0], _NORM_WARPS), 1)
        sizes = (np.int64(x.shape[0]), np.int64(x.shape[1]))
        name = f"rows.rms_norm_{_dtype(x)}"
        self._launch(name, grid, 32 * _NORM_WARPS, x, weight, np.float32(eps), out, *sizes)

    def token_logprobs(self, logits: Tensor, targets: Tensor, out: Tensor) -> None:
        """See `KernelBackend`."""
        num_rows, width = logits.shape
        name = f"rows.token_logprobs_{_dtype(logits)}"
        arguments = (logits, targets, out, np.int64(width))
        self._launch(name, (num_rows, 1), _LOGIT_THREADS, *arguments)

    def matmul(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        """See `KernelBackend`; float32 as on a CPU, bfloat16 on tensor cores."""
        num_rows, depth = x.shape
        num_columns = len(weight)
        sizes = (np.int64(num_rows), np.int64(num_columns), np.int64(depth))
        if x.dtype == torch.float32:
            grid = (_ceil(num_columns, 16), _ceil(num_rows, 8))
            self._launch("matmul.matmul_f32", grid, _THREADS, x, weight, out, *sizes)
            return
        _check_depth(depth)
        num_splits = split_of_depth(num_columns, depth)
        # Parts of K go to separate outputs and are added in order: atomics would add in any order.
        partial = torch.empty((num_splits, *out.shape), dtype=torch.float32, device=x.device)
        grid = (_ceil(num_columns, _GEMM_TILE), _ceil(num_rows, _GEMM_TILE) * num_splits)
        arguments = (x, weight, partial, *sizes, np.int32(num_splits))
        self._launch("sm90_matmul.matmul_bf16", grid, _GEMM_THREADS, *arguments)
        grid = (_ceil(out.numel(), _THREADS), 1)
        counts = (np.int64(out.numel()), np.int32(num_splits))
        self._launch("sm90_matmul.matmul_join", grid, _THREADS, partial, out, *counts)

    def mxfp8_grouped_matmul(self, x: Tensor, weight: Mxfp8, offsets: Tensor, out: Tensor) -> None:
        """See `KernelBackend`; bfloat16 only."""
        if x.dtype != torch.bfloat16:
            raise KernelArgumentError(f"x: expected bfloat16 for tensor cores, got {x.dtype}")
        num_experts, num_columns, depth = weight.codes.shape
        _check_depth(depth)
        # The number of tiles is known only on the GPU. The grid has the upper bound, so that the
        # host need not wait; surplus blocks return at once.
        tiles = (offsets.diff() + _GEMM_TILE - 1) // _GEMM_TILE
        tile_ends = tiles.cumsum(0, dtype=torch.int32)
        num_tiles_max = len(x) // _GEMM_TILE + num_experts
        self._launch(
            "sm90_experts.mxfp8_grouped_matmul",
            (_ceil(num_columns, _GEMM_TILE), num_tiles_max),
            _GEMM_THREADS,
            *(x, *weight, offsets, tile_ends, out),
            *(np.int32(num_experts), *map(np.int64, (len(x), num_columns, depth))),
        )

    def delta_changes(self, base: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """See `KernelBackend`."""
        # Two passes, which keep the order of positions: count the changes per tile; then, with the
        # running sum of the counts as offsets, write them. Reading the sum waits for the GPU.
        count, size = base.numel(), base.element_size()
        grid = (_ceil(count, _CHANGES_TILE), 1)
        counts = torch.empty(grid[0], dtype=torch.int32, device=base.device)
        name = f"changes.changes_count_{size}"
        self._launch(name, grid, _THREADS, base, target, counts, np.int64(count))
        ends = counts.cumsum(0, dtype=torch.int32)
        positions = torch.empty(int(ends[-1]), dtype=torch.int32, device=base.device)
        values = torch.empty(len(positions), dtype=base.dtype, device=base.device)
        if len(positions):
            arguments = (base, target, ends - counts, positions, values, np.int64(count))
            self._launch(f"changes.changes_write_{size}", grid, _THREADS, *arguments)
        return positions, values

    def delta_apply(self, bits: Tensor, positions: Tensor, values: Tensor) -> None:
        """See `KernelBackend`."""
        grid = (_ceil(len(positions), _THREADS), 1)
        name = f"changes.changes_apply_{bits.element_size()}"
        sizes = (np.int64(len(positions)), np.int64(bits.numel()))
        self._launch(name, grid, _THREADS, bits, positions, values, *sizes)


def split_of_depth(num_columns: int, depth: int) -> int:
    """Return into how many parts a product splits K."""
    # A function of the weight's shape only: if it depended on the batch, so would the bits.
    num_tiles = _ceil(num_columns, _GEMM_TILE)
    return max(1, min(_NUM_BLOCKS_AIM // num_tiles, depth // (4 * _GEMM_TILE), 16))


def _route_sizes(ids: Tensor, packed: Tensor, width: int) -> tuple[np.generic, ...]:
    return (np.int64(len(ids)), *map(np.int32, (ids.shape[1], packed.shape[1], width)))


def _ceil(count: int, of: int) -> int:
    return -(-count // of)


def _dtype(tensor: Tensor) -> str:
    return "bf16" if tensor.dtype == torch.bfloat16 else "f32"


def _check_depth(depth: int) -> None:
    if depth % _GEMM_TILE:
        raise KernelArgumentError(f"K: expected a multiple of {_GEMM_TILE}, got {depth}")
