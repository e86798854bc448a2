"""A row's bits do not depend on the batch around it; ordinary products' do."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from penstock.actors.policy.experts import round_to

WIDTH, NUM_ROWS = 320, 37


@pytest.fixture
def rows():
    return torch.randn(NUM_ROWS, WIDTH, generator=torch.Generator().manual_seed(0))


def kernels():
    return {name: partial(round_to, expert_format=name) for name in ("mxfp8", "nvfp4")}


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
