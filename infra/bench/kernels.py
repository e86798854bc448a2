"""Every kernel against its roofline and against what torch offers, in one run.

The roofline is the machine's own: bytes over the speed of a large copy measured here, or for
matrix products the operations over torch's own large product. Kernel and library alternate and
medians are compared.
"""

import statistics
import time
from typing import NamedTuple

import torch

from penstock.infra.bench.kernel_cases import KernelCase, Run, list_cases

_NUM_ROUNDS = 7
_COPY_BYTES = {"cpu": 1 << 28, "cuda": 1 << 32}
_PRODUCT_SIZE = {"cpu": 1024, "cuda": 8192}


class _Machine(NamedTuple):
    copy_gb_s: float
    """Read and written."""
    product_gflop_s: float


def bench_kernels() -> dict[str, object]:
    """Measure every kernel on the GPU if there is one, else on one thread of the CPU.

    Returns:
        `device`, `copy_gb_s`, `product_gflop_s`, and `kernels`: by name, then by shape, `time_us`,
        `gb_s`, `gflop_s` (products), `roofline_fraction`, and `library_ratio`: torch's time over
        ours, so above 1 we are faster.

    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        machine = _measure_machine(device)
        kernels: dict[str, dict[str, dict[str, float]]] = {}
        for name, case in list_cases(device):
            kernels.setdefault(name, {})[case.shape] = _measure(case, machine, device)
    finally:
        torch.set_num_threads(before)
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, 1 thread"
    return {"device": name, **machine._asdict(), "kernels": kernels}


def _measure_machine(device: str) -> _Machine:
    source = torch.zeros(_COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)
    copy_s = _median_s(lambda: target.copy_(source), device)
    size = _PRODUCT_SIZE[device]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    x, y = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    product_s = _median_s(lambda: x @ y, device)
    return _Machine(2 * source.numel() / copy_s / 1e9, 2 * size**3 / product_s / 1e9)


def _measure(case: KernelCase, machine: _Machine, device: str) -> dict[str, float]:
    library_s: list[float] = []
    kernel_s: list[float] = []
    for _ in range(_NUM_ROUNDS):
        kernel_s.append(_time_s(case.kernel, device))
        if case.library is not None:
            library_s.append(_time_s(case.library, device))
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


def _median_s(run: Run, device: str) -> float:
    return statistics.median([_time_s(run, device) for _ in range(_NUM_ROUNDS)][1:])


def _time_s(run: Run, device: str) -> float:
    """Time one call so that only it counts: thread's processor time, or between a GPU's events."""
    if device == "cpu":
        started = time.thread_time()
        run()
        return time.thread_time() - started
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3
