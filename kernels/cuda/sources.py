"""The CUDA sources: which kernels each holds, and what a kernel may cost.

To add a kernel: its line here, with the most registers per thread that it may use (the build is
held to it, and to no spills and no local memory), and its call in `backend.py`.
"""

from pathlib import Path

FOLDER = Path(__file__).parent / "src"
_DTYPES = ("f32", "bf16")

REGISTERS_MAX: dict[str, dict[str, int]] = {
    "quantize": {
        f"mxfp8_{kind}_{dtype}": 64
        for kind in ("rows", "tile", "dequantize_rows", "dequantize_columns")
        for dtype in _DTYPES
    },
    "routing": {
        "router_topk_1": 64,
        "router_topk_2": 64,
        "router_topk_4": 80,
        "router_topk_8": 128,
        "routes_pack": 40,
        "routes_unpack": 40,
    },
    "rows": {
        f"{kind}_{dtype}": limit
        for kind, limit in (("rms_norm", 64), ("token_logprobs", 96), ("moe_combine", 64))
        for dtype in _DTYPES
    },
    "matmul": {"matmul_f32": 128},
    "changes": {
        f"changes_{kind}_{size}": 64 for kind in ("count", "write", "apply") for size in (1, 2, 4)
    },
    "sm90_matmul": {"matmul_bf16": 168, "matmul_join": 40},
    "sm90_experts": {"mxfp8_grouped_matmul": 128},
}
"""By source, each kernel's most registers per thread; 64 lets a multiprocessor hold 32 warps."""


def source_path(name: str) -> Path:
    """Return the file of a source."""
    return FOLDER / f"{name}.cu"


def source_bytes(name: str) -> bytes:
    """Return everything that a source's result depends on."""
    headers = sorted(FOLDER.glob("*.cuh"))
    return b"\0".join(path.read_bytes() for path in [source_path(name), *headers])
