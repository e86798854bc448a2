"""Own losses say which ratio they take; one that says nothing is not corrected by another."""

import sys
import types

import pytest
import torch

from penstock.actors.trainer.config import LossConfig
from penstock.actors.trainer.objective.losses import (
    LossTokens,
    TokenLosses,
    corrected_ratios,
    token_losses,
)
from penstock.actors.trainer.objective.registry import LossSpec
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference


def ratio_loss(tokens, config):
    ratio = (tokens.current - tokens.behavior).exp()
    values = -tokens.weights * ratio * tokens.advantages
    return TokenLosses(values=values, is_clipped=torch.zeros_like(values, dtype=torch.bool))


@pytest.fixture
def own(monkeypatch):
    """A module of own code, which settings can name."""
    module = types.ModuleType("own_losses")
    monkeypatch.setitem(sys.modules, "own_losses", module)
    load_reference.cache_clear()
    yield module
    load_reference.cache_clear()


def tokens():
    return LossTokens(
        current=torch.tensor([-1.0]), proximal=torch.tensor([-2.0]), behavior=torch.tensor([-3.0]),
        advantages=torch.ones(1), weights=torch.ones(1),
        sequence_ids=torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip


def test_a_loss_that_declares_no_ratio_takes_no_correction(own):
    own.loss = ratio_loss
    with pytest.raises(ConfigError, match=r"correction: expected none.*own_losses:loss.*LossSpec"):
        token_losses(tokens(), LossConfig(name="own_losses:loss"))
    token_losses(tokens(), LossConfig(name="own_losses:loss", correction="none"))


@pytest.mark.parametrize("declared", [None, "proximal", "behavior"])
def test_a_declared_ratio_decides_which_correction_is_left(own, declared):
    own.loss = LossSpec(ratio_loss, ratio_against=declared)
    corrected = LossConfig(name="own_losses:loss")
    given = tokens()
    if declared == "behavior":
        with pytest.raises(ConfigError, match="correction: expected none, since own_losses:loss's"):
            token_losses(given, corrected)
        corrected = LossConfig(name="own_losses:loss", correction="none")
    token_losses(given, corrected)
    left = corrected_ratios(given.current, given.proximal, given.behavior, corrected)
    assert left.item() == (1.0 if declared == "proximal" else 2.0)


def test_what_is_no_loss_is_named(own):
    own.loss = 3
    with pytest.raises(ConfigError, match=r"expected a penstock\.LossSpec or a function, got int"):
        token_losses(tokens(), LossConfig(name="own_losses:loss"))
