"""Every kernel on a GPU against its roofline and against what torch offers, in one run.

The roofline is the machine's own: bytes over the speed of a large copy measured here, or for
matrix products the operations over torch's own large product. Kernel and library alternate and
medians are compared.
"""

import statistics
from typing import NamedTuple

import torch

from penstock.infra.bench.kernel_cases import KernelCase, Run, list_cases
from penstock.kernels.backend import KernelUnavailableError

_NUM_ROUNDS = 7
_COPY_BYTES = 1 << 32
_PRODUCT_SIZE = 8192


class _Machine(NamedTuple):
    copy_gb_s: float
    """Read and written."""
    product_gflop_s: float


def bench_kernels() -> dict[str, object]:
    """Measure every kernel.

    Returns:
        `device`, `copy_gb_s`, `product_gflop_s`, and `kernels`: by name, then by shape, `time_us`,
        `gb_s`, `gflop_s` (products), `roofline_fraction`, and `library_ratio`: torch's time over
        ours, so above 1 we are faster.

    Raises:
        KernelUnavailableError: There is no GPU.

    """
    if not torch.cuda.is_available():
        raise KernelUnavailableError("bench kernels: expected a CUDA device, found none")
    machine = _measure_machine()
    kernels: dict[str, dict[str, dict[str, float]]] = {}
    for name, case in list_cases():
        kernels.setdefault(name, {})[case.shape] = _measure(case, machine)
    return {"device": torch.cuda.get_device_name(), **machine._asdict(), "kernels": kernels}


def _measure_machine() -> _Machine:
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.ones_like(source)
    copy_s = _median_s(lambda: target.copy_(source))
    size = _PRODUCT_SIZE
    x, y = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    product_s = _median_s(lambda: x @ y)
    return _Machine(2 * source.numel() / copy_s / 1e9, 2 * size**3 / product_s / 1e9)


def _measure(case: KernelCase, machine: _Machine) -> dict[str, float]:
    library_s: list[float] = []
    kernel_s: list[float] = []
    for _ in range(_NUM_ROUNDS):
        kernel_s.append(_time_s(case.kernel))
        if case.library is not None:
            library_s.append(_time_s(case.library))
    seconds = statistics.median(kernel_s[1:])
    least_s = max(
        case.num_bytes / machine.copy_gb_s / 1e9,
        case.num_operations / machine.product_gflop_s / 1e9,
    )
    result = {
        "time_us": seconds * 1e6,
        "gb_s": case.num_bytes / seconds / 1e9,
        "roofline_fraction": least_s / seconds,
    }
    if case.num_operations:
        result["gflop_s"] = case.num_operations / seconds / 1e9
    if library_s:
        result["library_ratio"] = statistics.median(library_s[1:]) / seconds
    return result


def _median_s(run: Run) -> float:
    return statistics.median([_time_s(run) for _ in range(_NUM_ROUNDS)][1:])


def _time_s(run: Run) -> float:
    """Time one call between two events of the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
