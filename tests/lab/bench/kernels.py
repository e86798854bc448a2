"""Every kernel on a GPU against its roofline and against what torch offers, in one run.

The roofline is the machine's own: bytes over the speed of a large copy measured here, or for
matrix products the operations over torch's own large product. Kernel and library alternate and
medians are compared. Calls are queued behind a pause, so that the GPU never waits for the host.
"""

import argparse
import statistics
import time
from typing import NamedTuple

import torch
from tests.lab.bench.kernel_cases import KernelCase, Run, list_cases

from penstock.kernels.backend import KernelUnavailableError

_NUM_ROUNDS, _NUM_CALLS = 7, 10
_PAUSE_CYCLES = 20_000_000
"""About 10 ms: longer than the host takes to queue the calls of a round."""
_COPY_BYTES = 1 << 32
_PRODUCT_SIZE = 8192


class _Machine(NamedTuple):
    copy_gb_s: float
    """Read and written."""
    product_gflop_s: float


def run(_arguments: argparse.Namespace) -> dict[str, object]:
    """Measure every kernel.

    Returns:
        `device`, `copy_gb_s`, `product_gflop_s`, and `kernels`: by name, then by shape, `time_us`,
        `spread` (of the rounds' times, largest over smallest), `host_us` (to queue a call), `gb_s`,
        `gflop_s` (products), `roofline_fraction`, and `library_ratio`: torch's time over ours, so
        above 1 we are faster.

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
    source = torch.randint(0, 256, (_COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_s = _median_s(lambda: target.copy_(source))
    size = _PRODUCT_SIZE
    x, y = (torch.randn(size, size, device="cuda").bfloat16() for _ in range(2))
    product_s = _median_s(lambda: x @ y)
    return _Machine(2 * source.numel() / copy_s / 1e9, 2 * size**3 / product_s / 1e9)


def _measure(case: KernelCase, machine: _Machine) -> dict[str, float]:
    library: list[_Timing] = []
    kernel: list[_Timing] = []
    for _ in range(_NUM_ROUNDS):
        kernel.append(_time(case.kernel))
        if case.library is not None:
            library.append(_time(case.library))
    rounds = [timing.device_s for timing in kernel[1:]]
    seconds = statistics.median(rounds)
    least_s = max(
        case.num_bytes / machine.copy_gb_s / 1e9,
        case.num_operations / machine.product_gflop_s / 1e9,
    )
    result = {
        "time_us": seconds * 1e6,
        "spread": max(rounds) / min(rounds),
        "host_us": statistics.median(timing.host_s for timing in kernel[1:]) * 1e6,
        "gb_s": case.num_bytes / seconds / 1e9,
        "roofline_fraction": least_s / seconds,
    }
    if case.num_operations:
        result["gflop_s"] = case.num_operations / seconds / 1e9
    if library:
        library_s = statistics.median(timing.device_s for timing in library[1:])
        result["library_ratio"] = library_s / seconds
    return result


def _median_s(run: Run) -> float:
    return statistics.median([_time(run).device_s for _ in range(_NUM_ROUNDS)][1:])


class _Timing(NamedTuple):
    """Of one call, on average over a round."""

    device_s: float
    """Between two events of the GPU."""
    host_s: float


def _time(run: Run) -> _Timing:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_PAUSE_CYCLES)  # pyright: ignore[reportPrivateUsage, reportUnknownMemberType]
    start.record()
    begun = time.perf_counter()
    for _ in range(_NUM_CALLS):
        run()
    host_s = time.perf_counter() - begun
    end.record()
    end.synchronize()
    return _Timing(start.elapsed_time(end) / 1e3 / _NUM_CALLS, host_s / _NUM_CALLS)
