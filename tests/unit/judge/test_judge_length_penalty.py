"""The form of the length penalty."""

import itertools
import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.judge.config import LengthPenaltyConfig
from penstock.actors.judge.reward import effort, length_penalty, penalty_curve
from penstock.messages.reward import Lengths


@pytest.mark.parametrize("q", [0.0, 0.5, 0.999, 1.0, 1.001, 2.0, 3.0])
@pytest.mark.parametrize("k", [0.01, 0.5, 4.0])
def test_curve_starts_at_zero_with_slope_one(k: float, q: float) -> None:
    assert penalty_curve(0.0, k, q) == 0.0
    step = 1e-6
    assert penalty_curve(step, k, q) / step == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("x", [0.1, 1.0, 10.0, 1000.0])
def test_curve_reaches_the_logarithm_as_q_goes_to_one(x: float) -> None:
    limit = math.log(1 + 0.5 * x) / 0.5
    assert penalty_curve(x, 0.5, 1.0) == pytest.approx(limit, rel=1e-12)
    for distance in (1e-4, 1e-6, 1e-8, 1e-10):
        near = penalty_curve(x, 0.5, 1.0 - distance), penalty_curve(x, 0.5, 1.0 + distance)
        assert near == pytest.approx((limit, limit), rel=1e1 * distance + 1e-12)


def test_curve_by_hand() -> None:
    assert penalty_curve(3.0, 1.0, 0.5) == pytest.approx(2.0)  # (4^0.5 - 1) / 0.5
    assert penalty_curve(3.0, 1.0, 2.0) == pytest.approx(0.75)  # (1/4 - 1) / -1
    assert penalty_curve(7.0, 2.0, 0.0) == pytest.approx(7.0)
    assert penalty_curve(7.0, 0.0, 2.0) == 7.0


def test_curve_rises_and_bends_down() -> None:
    values = [penalty_curve(float(x), 0.5, 1.0) for x in range(6)]
    steps = [b - a for a, b in itertools.pairwise(values)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)


def test_penalty_weighs_each_kind() -> None:
    weights = LengthPenaltyConfig(
        scale=1.0, penalty_max=1e9, q=0.0, thinking_token=1.0, call_token=2.0, final_token=4.0,
        output_token=10.0, call=100.0, turn=1000.0,
    )  # fmt: skip
    lengths = Lengths(thinking=1, call=2, output=4, final=3, num_calls=2, num_turns=2)
    assert length_penalty(lengths, weights) == pytest.approx(1 + 4 + 12 + 40 + 200 + 2000)


@given(counts=st.tuples(*[st.integers(0, 5000)] * 6))
def test_equal_weights_of_kinds_give_the_bits_of_one_weight(counts) -> None:
    thinking, call, output, final, num_calls, num_turns = counts
    lengths = Lengths(
        thinking=thinking, call=call, output=output, final=final, num_calls=num_calls,
        num_turns=num_turns,
    )  # fmt: skip
    sampled = thinking + call + final
    assert effort(lengths, LengthPenaltyConfig()) == (
        0.002 * sampled + 0.0005 * output + 0.1 * num_calls + 0.1 * num_turns
    )


def test_penalty_is_bounded() -> None:
    config = LengthPenaltyConfig(scale=1.0, penalty_max=0.2)
    assert length_penalty(Lengths(final=3200, num_turns=8, num_calls=50), config) == 0.2


def test_negative_weights_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="output_token"):
        msgspec.convert({"output_token": -1.0}, LengthPenaltyConfig)
