"""Every loss of the registry: the ratio that it declares, and that no token is weighted twice."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.actors.trainer.config import CORRECTIONS, LossConfig
from penstock.actors.trainer.objective.corrections import correction_weights
from penstock.actors.trainer.objective.losses import LossTokens, corrected_ratios, token_losses
from penstock.actors.trainer.objective.ratios import Ratios
from penstock.actors.trainer.objective.registry import LOSSES
from penstock.messages.errors import ConfigError

UNBOUNDED = {
    "clip_low": 1.0, "clip_high": 1e9, "ratio_cap": 1e9, "ratio_low": 0.0, "ratio_high": 1e9,
    "geometric_low": 0.0, "geometric_high": 1e9, "token_denominator": 1.0,
}  # fmt: skip
"""No bound takes effect, so that what is left of a gradient is the ratio."""
LOGPROBS = st.floats(-4.0, 0.0)
TOKEN = st.tuples(LOGPROBS, LOGPROBS, LOGPROBS, st.floats(0.5, 2.0), st.sampled_from([1.0, -1.0]))
BATCH = st.lists(TOKEN, min_size=1, max_size=4)


def gradients(config, batch, weights=None):
    """Return each token's gradient over -A, and its three logprobs; a token is a sequence."""
    current, proximal, behavior, size, sign = torch.tensor(batch, dtype=torch.float64).T
    advantages, leaf = size * sign, current.clone().requires_grad_()
    ids = torch.arange(len(batch))
    if weights is None:
        left = Ratios.unmeasured(corrected_ratios(current, proximal, behavior, config))
        weights = correction_weights(left, ids, config)
    tokens = LossTokens(
        current=leaf, proximal=proximal, behavior=behavior, advantages=advantages,
        weights=weights, sequence_ids=ids,
    )  # fmt: skip
    token_losses(tokens, config).values.sum().backward()
    return -leaf.grad / advantages, current, proximal, behavior


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=50, deadline=None)
@given(batch=BATCH)
def test_the_declared_ratio_is_the_one_that_the_loss_takes(name, batch):
    config = LossConfig(name=name, correction="none", **UNBOUNDED)
    weights = torch.ones(len(batch), dtype=torch.float64)
    found, current, *others = gradients(config, batch, weights)
    before = dict(zip(("proximal", "behavior"), others, strict=True))
    against = before.get(LOSSES[name].ratio_against, current)
    torch.testing.assert_close(found, (current - against).exp())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("correction", CORRECTIONS)
@settings(max_examples=25, deadline=None)
@given(batch=BATCH)
def test_no_accepted_combination_weights_a_token_twice(name, correction, batch):
    spec = LOSSES[name]
    try:
        config = LossConfig(name=name, correction=correction, **UNBOUNDED)
    except ConfigError:
        assert spec.corrects_itself and correction != "none"
        return
    found, current, _, behavior = gradients(config, batch)
    if spec.corrects_itself or correction != "none":
        torch.testing.assert_close(found, (current - behavior).exp())


@pytest.mark.parametrize("name", [name for name, spec in LOSSES.items() if spec.corrects_itself])
def test_the_default_correction_is_refused_beside_a_loss_that_corrects_itself(name):
    with pytest.raises(ConfigError, match=f"correction: expected none, since {name}'s"):
        LossConfig(name=name)
