"""The gradient's norm is the same bits however tensors are cut into rows."""

import math
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.trainer.learner import norm, row_squares

SHAPES = st.lists(st.integers(1, 9), min_size=0, max_size=3)


@given(shape=SHAPES, seed=st.integers(0, 99), data=st.data())
def test_the_norm_does_not_depend_on_who_holds_which_rows(shape, seed, data):
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    cuts = data.draw(st.lists(st.integers(0, shape[0]), max_size=4)) if shape else []
    ends = sorted([0, *cuts, *shape[:1]])
    parts = [gradient[a:b] for a, b in pairwise(ends)] or [gradient]
    apart = [square for part in reversed(parts) for square in row_squares(part)]
    assert norm(apart) == norm(row_squares(gradient))
    assert math.isclose(norm(apart), float(gradient.double().norm()), rel_tol=1e-12, abs_tol=0)


def test_a_norm_that_is_no_number_is_not_hidden():
    assert math.isnan(norm(row_squares(torch.tensor([[1.0, math.nan], [1.0, 2.0]]))))
    assert math.isinf(norm(row_squares(torch.tensor([-math.inf, 1.0]))))
