"""The kernels on a CUDA device: bits against the references, poisoned results, late checks."""

import pytest
import torch

from penstock.kernels import ops
from penstock.kernels.backend import KernelArgumentError
from penstock.kernels.cuda.launch import cuda_kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch):
    """Give every result NaN or 0x55 before the kernel runs: what it does not write shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(0x55)

    monkeypatch.setattr(torch, "empty", poisoned)


def test_routes_are_packed_to_the_references_bytes():
    for shape, num_experts in (((333, 60, 8), 384), ((7, 3, 5), 8), ((64, 48, 8), 128)):
        ids = torch.randint(0, num_experts, shape)
        packed = ops.routes_pack(ids.cuda(), num_experts)
        assert torch.equal(packed.cpu(), ops.routes_pack(ids, num_experts))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32])
def test_changes_are_written(dtype):
    base = (torch.randn(3_000_001) * 50).to(dtype)
    positions = (torch.rand(len(base)) < 0.03).nonzero()[:, 0].int()
    values = base[positions.long()] + 1
    weights, expected = base.cuda(), base.clone()
    ops.delta_apply(weights, positions.cuda(), values.cuda())
    ops.delta_apply(expected, positions, values)
    assert torch.equal(weights.cpu(), expected)
    ops.raise_deferred_errors()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device():
    ids = torch.randint(0, 8, (64, 2, 2)).cuda()
    weights, values = torch.zeros(100).cuda(), torch.ones(3).cuda()
    positions = torch.tensor([1, 2, 99], dtype=torch.int32).cuda()

    def calls():
        ops.routes_pack(ids, 8)
        ops.delta_apply(weights, positions, values)

    calls()
    torch.cuda.set_sync_debug_mode("error")
    try:
        calls()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ops.raise_deferred_errors()


def test_wrong_values_are_raised_late_and_harm_nothing():
    weights = torch.zeros(4).cuda()
    positions = torch.tensor([1, -1, 1 << 30], dtype=torch.int32).cuda()
    ops.delta_apply(weights, positions, torch.ones(3).cuda())
    with pytest.raises(KernelArgumentError, match="positions"):
        ops.raise_deferred_errors()
    assert weights.tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "name",
    ["routes.routes_pack", *(f"delta.delta_apply_{size}" for size in (1, 2, 4))],
)  # fmt: skip
def test_kernels_leave_room_for_32_warps_and_spill_nothing(name):
    attributes = cuda_kernel(name, 0).attributes
    assert attributes["num_regs"] <= 64
    assert attributes["local_size_bytes"] == 0
