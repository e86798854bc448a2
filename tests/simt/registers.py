"""What each CUDA kernel may cost, and what the compiler said that it does."""

import re
from pathlib import Path
from typing import NamedTuple

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
_USAGE = re.compile(
    r"Compiling entry function '(?P<kernel>\w+)'.*?"
    r"(?P<stack_bytes>\d+) bytes stack frame, (?P<spill_stores>\d+) bytes spill stores, "
    r"(?P<spill_loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers",
    re.DOTALL,
)


class Usage(NamedTuple):
    """What ptxas says of one kernel."""

    registers: int
    """A thread."""
    stack_bytes: int
    spill_bytes: int


def read_usage(cubin: Path) -> dict[str, Usage]:
    """Return each kernel's cost, from what the compiler said when it made the cubin."""
    said = cubin.with_suffix(".log").read_text()
    return {
        match["kernel"]: Usage(
            int(match["registers"]),
            int(match["stack_bytes"]),
            int(match["spill_stores"]) + int(match["spill_loads"]),
        )
        for match in _USAGE.finditer(said)
    }
