"""What kernels refuse, and what is needed to import and to build them."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from tests.simt.shim import SIMT

from penstock.kernels import ops
from penstock.kernels.backend import KernelArgumentError, KernelUnavailableError
from penstock.kernels.cuda.backend import CudaBackend
from penstock.kernels.cuda.launch import launch_cuda
from penstock.messages.errors import PenstockError

INT32 = torch.int32
CUDA = CudaBackend(launch_cuda, "cuda")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ops.routes_pack(torch.zeros(2, 8), 8), "expected"),
        (lambda: ops.routes_pack(torch.full((2, 1, 1), 8), 8), "expert ids: expected 0..7, got 8"),
        (lambda: ops.delta_apply(torch.zeros(4), torch.tensor([4], dtype=INT32), torch.ones(1)),
         "positions: expected 0..3, got 4"),
        (lambda: ops.routes_pack(torch.zeros(1, 1, 1).int(), 8, backend=CUDA),
         "expected cuda tensors"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(KernelArgumentError, match=text) as caught:
        call()
    assert isinstance(caught.value, PenstockError)
    assert isinstance(caught.value, ValueError)


def test_a_refused_apply_writes_nothing():
    weights = torch.zeros(4)
    positions = torch.tensor([1, -1], dtype=INT32)
    with pytest.raises(KernelArgumentError):
        ops.delta_apply(weights, positions, torch.ones(2))
    assert not weights.any()


def test_a_gpu_is_not_waited_for_and_leaves_out_what_lies_outside():
    """The shim runs the CUDA sources, and its checks of values come late as a GPU's do."""
    weights = torch.zeros(4)
    positions = torch.tensor([1, -1, 4], dtype=INT32)
    ops.delta_apply(weights, positions, torch.ones(3), backend=SIMT)
    assert weights.tolist() == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(KernelArgumentError, match=r"positions: expected 0\.\.3, got -1\.\.4"):
        ops.raise_deferred_errors()
    ops.delta_apply(weights, positions[:1], torch.ones(1), backend=SIMT)
    ops.raise_deferred_errors()


def test_empty_tensors_go_through():
    assert ops.routes_pack(torch.zeros(0, 2, 3, dtype=torch.int16), 8).shape == (0, 3)


@pytest.mark.timeout(180)
def test_importing_needs_neither_cuda_nor_cupy():
    check = "import sys, penstock.kernels.ops; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=170)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed")
def test_no_cupy_is_said_clearly():
    with pytest.raises(KernelUnavailableError, match="cupy"):
        launch_cuda("delta.delta_apply_4", (1, 1), 32, torch.zeros(1))
