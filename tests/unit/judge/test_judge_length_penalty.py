"""The form of the length penalty."""

import itertools
import math

import msgspec
import pytest

from penstock.actors.judge.reward import LengthPenaltyConfig, length_penalty, penalty_curve
from penstock.messages.base import Array
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    Turn,
    VersionSpan,
)
from penstock.messages.task import Purpose


def make_turn(num_context: int, num_sampled: int) -> Turn:
    def zeros(count: int, dtype: str) -> Array:
        return Array(dtype=dtype, shape=(count,), data=bytes(4 * count))

    return Turn(
        context_ids=zeros(num_context, "int32"),
        token_ids=zeros(num_sampled, "int32"),
        behavior_logprobs=zeros(num_sampled, "float32"),
        version_spans=[VersionSpan(policy_version=0, num_tokens=num_sampled)],
        stop_reason=StopReason.STOP,
    )


def make_rollout(turns: list[Turn], num_calls: int) -> RolloutFinished:
    return RolloutFinished(
        rollout_id="g0-m0",
        group_id="g0",
        group_index=0,
        group_size=1,
        member=0,
        purpose=Purpose.TRAIN,
        task_id="t",
        category="r",
        end=EpisodeEnd.FINISHED,
        turns=[turn.summary for turn in turns],
        files=EpisodeFiles(),
        num_calls=num_calls,
    )


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


def test_penalty_weighs_tokens_calls_and_turns_but_not_the_prompt() -> None:
    weights = LengthPenaltyConfig(
        scale=1.0, penalty_max=1e9, q=0.0, sampled_token=1.0, observed_token=10.0, call=100.0,
        turn=1000.0,
    )  # fmt: skip
    rollout = make_rollout([make_turn(50, 3), make_turn(4, 5)], num_calls=2)
    assert length_penalty(rollout, weights) == pytest.approx(8 + 40 + 200 + 2000)


def test_penalty_is_bounded() -> None:
    config = LengthPenaltyConfig(scale=1.0, penalty_max=0.2)
    assert length_penalty(make_rollout([make_turn(5, 400)] * 8, 50), config) == 0.2


def test_negative_weights_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="observed_token"):
        msgspec.convert({"observed_token": -1.0}, LengthPenaltyConfig)
