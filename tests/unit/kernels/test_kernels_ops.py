"""What kernels refuse, and what is needed to import and to build them."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from tests.simt.registers import REGISTERS_MAX, read_usage
from tests.simt.shim import SIMT

from penstock.kernels import ops
from penstock.kernels.backend import KernelArgumentError, KernelUnavailableError
from penstock.kernels.cuda.backend import CudaBackend
from penstock.kernels.cuda.launch import compile_cubin, find_nvcc, launch_cuda
from penstock.kernels.ops import Routing
from penstock.messages.errors import PenstockError

INT32 = torch.int32
CUDA = CudaBackend(launch_cuda, "cuda")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: ops.mxfp8_quantize_rows(torch.zeros(4, 40)), "multiple of 32, got 40"),
        (lambda: ops.mxfp8_quantize_columns(torch.zeros(40, 64)), "multiple of 32, got 40"),
        (lambda: ops.mxfp8_quantize_rows(torch.zeros(4, 32).half()), "torch.float16"),
        (lambda: ops.router_topk(torch.zeros(2, 8), 9), "num_chosen: expected 1..8"),
        (lambda: ops.router_topk(torch.zeros(2, 8), 1, recorded=torch.full((2, 1), 8)), "-1..7"),
        (lambda: ops.router_topk(torch.zeros(1, 8), 2, recorded=torch.tensor([[3, -1]])),
         "recorded: -1 in a row"),
        (lambda: ops.routes_pack(torch.zeros(2, 8), 8), "expected"),
        (lambda: ops.rms_norm(torch.zeros(2, 8), torch.zeros(9), 1e-6), r"weight: expected \[8\]"),
        (lambda: ops.token_logprobs(torch.zeros(1, 8), torch.tensor([8])), "targets: expected"),
        (lambda: ops.matmul(torch.zeros(2, 8), torch.zeros(3, 9)), r"weight: expected \[any, 8\]"),
        (lambda: ops.delta_apply(torch.zeros(4), torch.tensor([4], dtype=INT32), torch.ones(1)),
         "positions: expected 0..3, got 4"),
        (lambda: ops.rms_norm(torch.zeros(1, 4), torch.ones(4), 0.0, backend=CUDA),
         "expected cuda tensors"),
        (lambda: ops.rms_norm(torch.zeros(1, 4, device="meta"), torch.ones(4), 0.0),
         "expected cpu or cuda tensors"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_named(call, text):
    with pytest.raises(KernelArgumentError, match=text) as caught:
        call()
    assert isinstance(caught.value, PenstockError)
    assert isinstance(caught.value, ValueError)


def test_offsets_must_cover_all_rows():
    weight = ops.mxfp8_quantize_rows(torch.zeros(2, 8, 32))
    for offsets in ([0, 3, 3], [0, 5, 4], [1, 2, 4]):
        with pytest.raises(KernelArgumentError, match="offsets"):
            ops.mxfp8_grouped_matmul(torch.zeros(4, 32), weight, torch.tensor(offsets, dtype=INT32))


def test_a_refused_apply_writes_nothing():
    weights = torch.zeros(4)
    positions = torch.tensor([1, -1], dtype=INT32)
    with pytest.raises(KernelArgumentError):
        ops.delta_apply(weights, positions, torch.ones(2))
    assert not weights.any()


def test_a_gpu_is_not_waited_for_and_leaves_out_what_lies_outside():
    """The shim runs the CUDA sources, and its checks of values come late as a GPU's do."""
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    found = ops.token_logprobs(logits, torch.tensor([1, 8, -1]), backend=SIMT)
    assert found.isnan().tolist() == [False, True, True]
    with pytest.raises(KernelArgumentError, match=r"targets: expected 0\.\.7, got -1\.\.8"):
        ops.raise_deferred_errors()
    weights = torch.zeros(4)
    positions = torch.tensor([1, -1, 4], dtype=INT32)
    ops.delta_apply(weights, positions, torch.ones(3), backend=SIMT)
    assert weights.tolist() == [0.0, 1.0, 0.0, 0.0]
    with pytest.raises(KernelArgumentError, match="positions"):
        ops.rms_norm(torch.ones(1, 4), torch.ones(4), 0.0, backend=SIMT)
        ops.delta_apply(weights, positions[:1], torch.ones(1), backend=SIMT)
    ops.raise_deferred_errors()


@pytest.mark.parametrize("missing", [99, -1])
def test_a_gpu_takes_no_expert_that_is_none(missing):
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    recorded = torch.tensor([[5, missing], [3, 1]], dtype=torch.int16)
    routing = Routing(*(torch.empty(2, 2, dtype=t) for t in (torch.int16, torch.float32)),
                      *(torch.empty(2, dtype=INT32) for _ in range(2)))  # fmt: skip
    SIMT.router_topk(logits, recorded, routing, normalize=True, plausibility_min=0.0)
    own = ops.router_topk(logits, 2).ids
    assert routing.ids[:, 0].tolist() == [5, 3]
    assert routing.ids[0, 1] in own[0]
    assert routing.num_replaced.tolist() == [1, 0]
    with pytest.raises(KernelArgumentError, match=r"expert ids|recorded"):
        ops.router_topk(logits, 2, recorded=recorded, backend=SIMT)
        ops.raise_deferred_errors()


@pytest.mark.parametrize("offsets", [[0, -70, 64], [0, 70, 64], [-64, 0, 64], [0, 1000, 2000]])
def test_a_gpu_reads_no_rows_that_are_not_there(offsets):
    weight = ops.mxfp8_quantize_rows(torch.ones(2, 8, 64))
    rows, wrong = torch.ones(64, 64).bfloat16(), torch.tensor(offsets, dtype=INT32)
    out = torch.zeros(64, 8).bfloat16()
    SIMT.mxfp8_grouped_matmul(rows, weight, wrong, out)
    assert ((out == 0) | (out == 64)).all()
    with pytest.raises(KernelArgumentError, match="offsets"):
        ops.mxfp8_grouped_matmul(rows, weight, wrong, backend=SIMT)
        ops.raise_deferred_errors()


def test_empty_tensors_go_through():
    assert ops.mxfp8_quantize_rows(torch.zeros(0, 64)).scales.shape == (0, 2)
    assert ops.router_topk(torch.zeros(0, 8), 2).ids.shape == (0, 2)
    assert ops.routes_pack(torch.zeros(0, 2, 3, dtype=torch.int16), 8).shape == (0, 3)
    assert ops.token_logprobs(torch.zeros(0, 8), torch.zeros(0).long()).shape == (0,)
    assert ops.matmul(torch.zeros(0, 8), torch.zeros(3, 8)).shape == (0, 3)
    positions, values = ops.delta_changes(torch.ones(5), torch.ones(5))
    assert len(positions) == len(values) == 0


def test_views_that_begin_anywhere_are_taken():
    x = torch.randn(65, generator=torch.Generator().manual_seed(0))
    assert torch.equal(
        ops.mxfp8_quantize_rows(x[1:].view(1, 64), backend=SIMT).codes,
        ops.mxfp8_quantize_rows(x[1:].clone().view(1, 64)).codes,
    )


@pytest.mark.timeout(180)
def test_importing_needs_neither_cuda_nor_cupy():
    check = "import sys, penstock.kernels.ops; sys.exit('cupy' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, timeout=170)


@pytest.mark.skipif(importlib.util.find_spec("cupy") is not None, reason="cupy is installed")
def test_no_cupy_is_said_clearly():
    with pytest.raises(KernelUnavailableError, match="cupy"):
        launch_cuda("rows.rms_norm_f32", (1, 1), 32, torch.zeros(1))


def test_no_nvcc_is_said_clearly(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match="nvcc"):
        compile_cubin("rows")


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
@pytest.mark.parametrize("source", list(REGISTERS_MAX))
@pytest.mark.timeout(300)
def test_every_source_compiles_within_its_registers_and_spills_nothing(source):
    usage = read_usage(compile_cubin(source))
    assert set(usage) == set(REGISTERS_MAX[source])
    for kernel, registers_max in REGISTERS_MAX[source].items():
        assert usage[kernel].registers <= registers_max, kernel
        assert (usage[kernel].stack_bytes, usage[kernel].spill_bytes) == (0, 0), kernel
