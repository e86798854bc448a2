"""The kernels on a CUDA device: bits against the references, poisoned results, many runs."""

from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from penstock.kernels import ops
from penstock.kernels.backend import KernelArgumentError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DTYPES = [torch.float32, torch.bfloat16]
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture(autouse=True)
def poisoned_results(monkeypatch):
    """Give every result NaN or 0xAA before the kernel runs: what it does not write shows."""
    empty = torch.empty

    def poisoned(*shape, **options):
        tensor = empty(*shape, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor.fill_(0x55)

    monkeypatch.setattr(torch, "empty", poisoned)


def random(*shape, dtype=torch.float32):
    torch.manual_seed(torch.seed() % 2**32)
    return torch.randn(*shape).to(dtype)


def assert_same_bits(kernel, *tensors):
    """Run on the GPU and in the reference; print the first coordinate that differs."""
    expected = _flat(kernel(*tensors))
    got = _flat(kernel(*(t.cuda() for t in tensors)))
    for want, have in zip(expected, (tensor.cpu() for tensor in got), strict=True):
        differs = ~((want == have) | ((want != want) & (have != have)))
        if differs.any():
            place = tuple(differs.nonzero()[0].tolist())
            pytest.fail(f"at {place}: reference {want[place]}, GPU {have[place]}")


def _flat(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in _flat(result)]


@each_dtype
def test_mxfp8(dtype):
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    finite = bits[bits.view(torch.bfloat16).isfinite()].view(torch.bfloat16)
    for x in (finite.to(dtype).view(-1, 32), random(512, 1056, dtype=dtype)):
        assert_same_bits(ops.mxfp8_quantize_rows, x)
    x = random(256, 1056, dtype=dtype) * torch.exp2(torch.randint(-90, 90, (256, 1056)).float())
    x[3, 40], x[40, 3] = torch.nan, torch.inf
    assert_same_bits(ops.mxfp8_quantize_both, x.to(dtype))
    quantized = ops.mxfp8_quantize_columns(x.to(dtype))
    for out_dtype in DTYPES:
        got = ops.mxfp8_dequantize(ops.Mxfp8(*(t.cuda() for t in quantized)), out_dtype)
        expected = ops.mxfp8_dequantize(quantized, out_dtype)
        torch.testing.assert_close(got.cpu(), expected, rtol=0, atol=0, equal_nan=True)


def test_routing():
    logits = random(1000, 384).round(decimals=2)
    recorded = torch.stack([torch.randperm(384)[:8] for _ in range(1000)])

    def replayed(logits, recorded):
        return ops.router_topk(logits, 8, recorded=recorded, plausibility_min=0.25)

    assert_same_bits(lambda x: ops.router_topk(x, 8), logits)
    assert_same_bits(replayed, logits, recorded)
    ids = torch.randint(0, 384, (333, 60, 8))
    packed = ops.routes_pack(ids.cuda(), 384)
    assert torch.equal(packed.cpu(), ops.routes_pack(ids, 384))
    assert torch.equal(ops.routes_unpack(packed, 60, 8, 384).cpu(), ids.to(torch.int16))


@each_dtype
def test_rows(dtype):
    x, weight = random(100, 7168, dtype=dtype), random(7168, dtype=dtype)
    assert_same_bits(lambda x, w: ops.rms_norm(x, w, 1e-6), x, weight)
    logits, targets = random(20, 163840, dtype=dtype), torch.randint(0, 163840, (20,))
    assert_same_bits(ops.token_logprobs, logits, targets)
    assert_same_bits(ops.moe_combine, random(50, 8, 7168, dtype=dtype), random(50, 8))


def test_changes():
    base = random(3_000_001, dtype=torch.bfloat16)
    target = torch.where(torch.rand(len(base)) < 0.03, base + 1, base)
    assert_same_bits(ops.delta_changes, base, target)
    weights = base.cuda()
    ops.delta_apply(weights, *ops.delta_changes(weights.clone(), target.cuda()))
    assert torch.equal(weights.cpu(), target)


@each_dtype
@pytest.mark.parametrize("num_rows", [1, 7, 64, 300])
def test_products_are_near_float64(dtype, num_rows):
    x, weight = random(num_rows, 2048, dtype=dtype).cuda(), random(1000, 2048, dtype=dtype).cuda()
    exact = x.double() @ weight.double().T
    error = (ops.matmul(x, weight).double() - exact).norm() / exact.norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 1e-6)


@each_dtype
def test_a_row_has_the_same_bits_in_any_batch(dtype):
    x, weight = random(200, 2048, dtype=dtype).cuda(), random(1000, 2048, dtype=dtype).cuda()
    together = ops.matmul(x, weight)
    for start, end in ((0, 1), (7, 8), (63, 65), (20, 150)):
        assert torch.equal(ops.matmul(x[start:end], weight), together[start:end])
    order = torch.randperm(200, device="cuda")
    assert torch.equal(ops.matmul(x[order], weight), together[order])


def test_the_inverse_cublas_is_not_batch_invariant():
    x = random(512, 4096, dtype=torch.bfloat16).cuda()
    weight = random(4096, 4096, dtype=torch.bfloat16).cuda()
    alone = torch.cat([F.linear(row[None], weight) for row in x])
    assert not torch.equal(alone, F.linear(x, weight))


def test_mxfp8_experts():
    sizes = [0, 1, 64, 65, 200]
    offsets = torch.tensor([0, *torch.tensor(sizes).cumsum(0)], dtype=torch.int32)
    x = random(sum(sizes), 1024, dtype=torch.bfloat16).cuda()
    weight = ops.mxfp8_quantize_rows(random(len(sizes), 192, 1024, dtype=torch.bfloat16).cuda())
    got = ops.mxfp8_grouped_matmul(x, weight, offsets.cuda())
    dense = ops.mxfp8_dequantize(weight).double()
    for expert, (start, end) in enumerate(pairwise(offsets)):
        exact = x[start:end].double() @ dense[expert].T
        if end > start:
            assert (got[start:end].double() - exact).norm() / exact.norm() < 3e-3
    one = torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32)
    assert torch.equal(ops.mxfp8_grouped_matmul(x[-1:], weight, one.cuda())[0], got[-1])


def test_a_thousand_runs_give_one_result():
    x = random(64, 2048, dtype=torch.bfloat16).cuda()
    weight = random(512, 2048, dtype=torch.bfloat16).cuda()
    first = ops.matmul(x, weight)
    for _ in range(1000):
        assert torch.equal(ops.matmul(x, weight), first)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_device():
    x, weight = random(64, 256, dtype=torch.bfloat16).cuda(), random(8, 256).bfloat16().cuda()
    experts = ops.mxfp8_quantize_rows(random(2, 64, 256, dtype=torch.bfloat16).cuda())
    offsets = torch.tensor([0, 40, 64], dtype=torch.int32).cuda()
    targets = torch.zeros(64, dtype=torch.int64).cuda()

    def calls():
        logits = ops.matmul(x, weight)
        routing = ops.router_topk(logits.float(), 2)
        ops.router_topk(logits.float(), 2, recorded=routing.ids)
        ops.routes_pack(routing.ids[:, None], 8)
        ops.mxfp8_grouped_matmul(x, experts, offsets)
        ops.token_logprobs(logits, targets)

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
