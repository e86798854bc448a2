"""Compiles a CUDA source for sm_90a, once, and reads what each kernel costs."""

import os
import re
import shutil
from pathlib import Path
from typing import NamedTuple

from penstock.kernels.cuda.sources import source_bytes, source_path
from penstock.kernels.errors import KernelUnavailableError
from penstock.kernels.native import build

_FLAGS = (
    *("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3"),
    *("-fmad=false", "-Xptxas", "-v"),
)
"""`-fmad=false`: what is fused says so in the source, as the frozen arithmetic demands."""

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


def find_nvcc() -> str | None:
    """Return the path of nvcc, or None."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc") or shutil.which("nvcc", path=f"{home}/bin")


def compile_cubin(source: str) -> Path:
    """Compile one source if it is not cached.

    Raises:
        KernelUnavailableError: there is no nvcc, or it refuses the source (its words are logged).

    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise KernelUnavailableError("CUDA kernels need nvcc: none on PATH nor under CUDA_HOME")
    command = [nvcc, *_FLAGS, str(source_path(source))]
    cubin = build(command, f"{source}.cubin", source_bytes(source))
    if cubin is None:
        raise KernelUnavailableError(
            f"CUDA kernels: nvcc does not compile {source}.cu; see the log"
        )
    return cubin


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
