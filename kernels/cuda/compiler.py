"""Compiles a CUDA source for sm_90a, once.

To add a kernel: its source in `src/`, its call in `backend.py`, and its registers in
`tests/simt/registers.py`, to which the build is held.
"""

import os
import shutil
from pathlib import Path

from penstock.kernels.backend import KernelUnavailableError
from penstock.kernels.native import build

FOLDER = Path(__file__).parent / "src"
NO_NVCC = "CUDA kernels need nvcc: none on PATH nor under CUDA_HOME"
_FLAGS = (
    *("-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-std=c++17", "-O3"),
    *("-fmad=false", "-Xptxas", "-v"),
)
"""`-fmad=false`: what is fused says so in the source, as the frozen arithmetic demands."""


def source_path(name: str) -> Path:
    """Return the file of a source."""
    return FOLDER / f"{name}.cu"


def source_bytes(name: str) -> bytes:
    """Return everything that a source's result depends on."""
    headers = sorted(FOLDER.glob("*.cuh"))
    return b"\0".join(path.read_bytes() for path in [source_path(name), *headers])


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
        raise KernelUnavailableError(NO_NVCC)
    command = [nvcc, *_FLAGS, f"-I{FOLDER}", str(source_path(source))]
    cubin = build(command, f"{source}.cubin", source_bytes(source))
    if cubin is None:
        raise KernelUnavailableError(
            f"CUDA kernels: nvcc does not compile {source}.cu; see the log"
        )
    return cubin
