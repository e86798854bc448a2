"""The same bits from the references and the CUDA sources, run thread by thread on a CPU."""

import numpy as np
import pytest
import torch
from tests.simt.shim import COMPILER, SIMT

from penstock.kernels import ops
from penstock.kernels.reference import float32
from penstock.kernels.reference.backend import ReferenceBackend

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
DTYPES = [torch.float32, torch.bfloat16]
REFERENCE = ReferenceBackend()
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_same_bits(kernel):
    """Compare the shim's results with the reference's; NaNs are alike."""
    expected, got = _flat(kernel(REFERENCE)), _flat(kernel(SIMT))
    assert len(expected) == len(got)
    for want, have in zip(expected, got, strict=True):
        assert want.dtype == have.dtype
        differs = ~((want == have) | ((want != want) & (have != have)))
        assert not differs.any(), f"first at {differs.nonzero()[0].tolist()}"


def _flat(results):
    if isinstance(results, torch.Tensor):
        return [results]
    return [tensor for result in results for tensor in _flat(result)]


@each_dtype
def test_mxfp8(dtype):
    spread = torch.randint(-60, 60, (64, 288), generator=torch.Generator().manual_seed(1))
    x = (random(64, 288) * torch.exp2(spread.float())).to(dtype)
    x[3, 40], x[40, 3], x[5, :32] = torch.nan, torch.inf, 0.0
    assert_same_bits(lambda b: ops.mxfp8_quantize_rows(x, backend=b))
    assert_same_bits(lambda b: ops.mxfp8_quantize_columns(x, backend=b))
    assert_same_bits(lambda b: ops.mxfp8_quantize_both(x, backend=b))
    for quantized in ops.mxfp8_quantize_both(x, backend=REFERENCE):
        assert_same_bits(lambda b, q=quantized: ops.mxfp8_dequantize(q, dtype, backend=b))


@pytest.mark.parametrize(("num_experts", "num_chosen"), [(16, 4), (384, 8), (600, 32)])
def test_routing(num_experts, num_chosen):
    logits = random(6, num_experts).round(decimals=1)
    logits[4, 1], logits[5] = torch.nan, torch.nan
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randperm(num_experts, generator=generator)[:num_chosen] for _ in range(6)]
    recorded = torch.stack(drawn)
    recorded[3] = -1
    assert_same_bits(lambda b: ops.router_topk(logits, num_chosen, backend=b))
    assert_same_bits(
        lambda b: ops.router_topk(
            logits,
            num_chosen,
            normalize=False,
            recorded=recorded,
            plausibility_min=0.5,
            backend=b,
        ),
    )
    ids = torch.randint(0, num_experts, (7, 3, 5), generator=generator)
    assert_same_bits(lambda b: ops.routes_pack(ids, num_experts, backend=b))
    packed = ops.routes_pack(ids, num_experts, backend=REFERENCE)
    assert_same_bits(lambda b: ops.routes_unpack(packed, 3, 5, num_experts, backend=b))


@each_dtype
@pytest.mark.parametrize("width", [256, 131])
def test_norms_and_sums_of_experts(dtype, width):
    x, weight = random(9, width).to(dtype), random(width, seed=1).to(dtype)
    assert_same_bits(lambda b: ops.rms_norm(x, weight, 1e-6, backend=b))
    slots, weights = random(3, 4, width).to(dtype), random(3, 4, seed=2)
    assert_same_bits(lambda b: ops.moe_combine(slots, weights, backend=b))


@each_dtype
def test_logprobs_with_masked_logits(dtype):
    logits = (random(4, 2500) * 4).to(dtype)
    logits[1, :1024], logits[2], logits[3, 9] = -torch.inf, -torch.inf, torch.nan
    logits[2, 7] = 0.0
    targets = torch.tensor([1, 2000, 7, 0])
    assert_same_bits(lambda b: ops.token_logprobs(logits, targets, backend=b))
    assert ops.token_logprobs(logits, targets, backend=SIMT)[2] == 0.0


def test_float32_products():
    x, weight = random(9, 300), random(21, 300, seed=1)
    assert_same_bits(lambda b: ops.matmul(x, weight, backend=b))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_changes(dtype):
    generator = torch.Generator().manual_seed(3)
    base = torch.randint(0, 100, (9001,), generator=generator).to(dtype)
    is_changed = torch.rand(9001, generator=generator) < 0.1
    target = torch.where(is_changed, base + 1, base).to(dtype)
    assert_same_bits(lambda b: ops.delta_changes(base, target, backend=b))
    weights = base.clone()
    for _ in range(2):
        ops.delta_apply(weights, *ops.delta_changes(base, target), backend=SIMT)
        assert torch.equal(weights, target)


def test_tensor_core_sources_index_right():
    """Sums of small integers are exact in any order, so only the indexing can be wrong."""
    generator = torch.Generator().manual_seed(4)

    def whole(*shape):
        return torch.randint(-4, 5, shape, generator=generator).bfloat16()

    x, weight = whole(66, 576), whole(72, 576)
    assert_same_bits(lambda b: ops.matmul(x, weight, backend=b))
    experts = ops.mxfp8_quantize_rows(whole(3, 72, 128))
    rows, offsets = whole(80, 128), torch.tensor([0, 70, 70, 80], dtype=torch.int32)
    assert_same_bits(lambda b: ops.mxfp8_grouped_matmul(rows, experts, offsets, backend=b))


@each_dtype
def test_the_frozen_order_is_near_float64(dtype):
    x, weight = random(8, 512).to(dtype), random(512, seed=1).to(dtype)
    wide = x.double()
    norm = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-21
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6).double(), norm, rtol=step, atol=0)
    logits = (random(8, 5000) * 5).to(dtype)
    targets = torch.arange(8)
    exact = logits.double().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    got = ops.token_logprobs(logits, targets).double()
    torch.testing.assert_close(got, exact, rtol=2e-7, atol=0)


def test_exp_and_log_are_near_float64():
    x = np.linspace(-86.9, 0.0, 20001, dtype=np.float32)
    assert np.max(np.abs(float32.exp(x) / np.exp(x.astype(float)) - 1)) < 2.0**-22
    y = np.concatenate([np.geomspace(1, 1e6, 20001), [1.0]]).astype(np.float32)
    assert np.max(np.abs(float32.log(y) - np.log(y.astype(float)))) < 2.0**-20
    assert float32.exp(np.float32([0.0, -90.0, -np.inf])).tolist() == [1.0, 0.0, 0.0]
