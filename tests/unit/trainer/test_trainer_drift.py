"""How far a step's version is from those that users' tokens came from."""

import pytest
import torch

from penstock.actors.trainer.objective.mismatch import sums_by_version


def test_figures_are_by_version_and_over_users_tokens_alone():
    ratios = [torch.zeros(3), torch.tensor([0.5, -0.5]), torch.tensor([9.0]), torch.zeros(1)]
    found = sums_by_version([4, 7, None, 4], ratios)
    assert sorted(found) == [4, 7]
    assert found[4].drift().num_tokens == 4
    assert found[4].drift().kl == 0.0
    assert found[4].drift().ess == 1.0
    one = torch.tensor([0.5, -0.5], dtype=torch.float64)
    assert found[7].drift().kl == pytest.approx(float((one.exp() - 1 - one).mean()))
    square = float(one.exp().sum()) ** 2 / (2 * float((2 * one).exp().sum()))
    assert found[7].drift().ess == pytest.approx(square)
