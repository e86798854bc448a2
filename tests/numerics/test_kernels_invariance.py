"""A row's bits do not depend on the batch around it; ordinary products' do."""

import pytest
import torch
from torch.nn import functional as F

from penstock.actors.policy.experts import round_to
from penstock.kernels import ops

WIDTH, NUM_ROWS = 320, 37


@pytest.fixture
def rows():
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def kernels():
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(48, WIDTH, generator=generator)
    scale = torch.randn(WIDTH, generator=generator)
    return {
        "matmul": lambda x: ops.matmul(x, weight),
        "rms_norm": lambda x: ops.rms_norm(x, scale, 1e-6),
        "token_logprobs": lambda x: ops.token_logprobs(x, torch.full((len(x),), 3)),
        "router_topk": lambda x: ops.router_topk(x, 8).weights,
        "mxfp8": lambda x: ops.mxfp8_quantize_rows(x).codes,
        "nvfp4": lambda x: round_to(x, "nvfp4"),
    }


@pytest.mark.parametrize("name", list(kernels()))
def test_alone_or_anywhere_in_a_batch_a_row_gives_the_same_bits(rows, name):
    kernel = kernels()[name]
    together = kernel(rows)
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    assert torch.equal(kernel(rows[order]), together[order])
    for start, end in ((0, 1), (5, 6), (3, 20)):
        assert torch.equal(kernel(rows[start:end]), together[start:end])


def test_torch_products_are_not_batch_invariant(rows):
    """The inverse: without the frozen order, the same check finds differing bits."""
    torch.set_num_threads(1)
    weight = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(1))
    together = F.linear(rows, weight)
    alone = torch.cat([F.linear(row[None], weight) for row in rows])
    assert not torch.equal(alone, together)
