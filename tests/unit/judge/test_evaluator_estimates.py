"""pass@k against its definition: all ways to choose k of n attempts."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.evaluator.evaluation import EvalBook, mean_pass_at_k, pass_at_k
from penstock.actors.evaluator.schedule import EvalSetConfig, EvaluatorConfig
from penstock.messages.errors import ConfigError
from penstock.messages.reward import EvalAnnounced, Outcome, Verdict
from penstock.messages.task import Purpose


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_solved_attempt(num: int, data) -> None:
    num_solved, k = data.draw(st.integers(0, num)), data.draw(st.integers(1, num))
    attempts = [index < num_solved for index in range(num)]
    chosen = list(combinations(attempts, k))
    expected = sum(map(any, chosen)) / len(chosen)
    assert pass_at_k(num_solved, num, k) == pytest.approx(expected, abs=1e-12)


def test_tasks_with_too_few_counted_attempts_are_left_out_of_a_k() -> None:
    assert mean_pass_at_k([(1, 4), (1, 2), (0, 0)], 4) == {1: 3 / 8, 2: 3 / 4, 4: 1.0}
    assert mean_pass_at_k([(1, 1), (0, 1)], 1) == {1: 0.5}
    assert mean_pass_at_k([(2, 6)], 6).keys() == {1, 2, 4, 6}
    assert mean_pass_at_k([], 2) == {}


def test_a_set_counts_attempts_by_task_and_source() -> None:
    book = EvalBook()
    announced = EvalAnnounced(
        eval_id="v3-hard", policy_version=3, num_tasks=2, num_samples=3, eval_set="hard",
        is_main=False,
    )  # fmt: skip
    assert book.announce(announced) is None
    outcomes = ["solved", "failed", "judge_error", "solved", "solved", "solved"]
    for index, outcome in enumerate(outcomes):
        completed = book.add(
            Verdict(
                rollout_id=f"ev3-hard-{index}", group_id="v3-hard", group_index=3,
                purpose=Purpose.EVAL, judge="hidden_tests", judge_version="1", reward=0.0,
                outcome=Outcome(outcome), policy_version=(version := 3 + (index == 4)),
                policy_version_max=version, category="c", source=f"s{index // 3}",
            )
        )  # fmt: skip
        assert (completed is None) == (index < 5)
    assert completed is not None
    assert (completed.num_solved, completed.num_tasks) == (3, 4)
    assert (completed.num_masked, completed.num_wrong_version) == (1, 1)
    assert completed.pass_rate_by_source == {"s0": 0.5, "s1": 1.0}
    assert completed.pass_at_k == {1: 0.75, 2: 1.0}
    assert (completed.eval_set, completed.is_main, completed.num_samples) == ("hard", False, 3)


def test_settings_of_sets_are_checked() -> None:
    one = EvalSetConfig(name="a")
    with pytest.raises(ConfigError, match=r"evaluator\.sets: expected each name once, got 'a'"):
        EvaluatorConfig(sets=(one, one))
    with pytest.raises(ConfigError, match=r"evaluator\.sets\.b\.num_samples: expected 1 if"):
        EvalSetConfig(name="b", num_samples=2, temperature=0.0)
    with pytest.raises(ConfigError, match=r"evaluator\.sets\.b\.temperature: expected 0, or"):
        EvalSetConfig(name="b", temperature=1e-9)
    [only] = EvaluatorConfig(num_eval_tasks=7, eval_every_steps=3).all_sets
    assert (only.name, only.num_tasks, only.every_steps) == ("", 7, 3)
