"""pass@k against its definition, intervals against simulation, paired tests against known ones."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.actors.evaluator.estimates import compare, estimates_by_k, pass_at_k, sign_test
from penstock.actors.evaluator.evaluation import EvalBook
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
    found = estimates_by_k([(1, 4), (1, 2), (0, 0)], 4)
    assert {k: one.value for k, one in found.items()} == {1: 3 / 8, 2: 3 / 4, 4: 1.0}
    assert [one.num_tasks for one in found.values()] == [2, 2, 1]
    assert estimates_by_k([(1, 1), (0, 1)], 1)[1].value == 0.5
    assert list(estimates_by_k([(2, 6)], 6)) == [1, 2, 4, 6]
    assert estimates_by_k([], 2) == {}


@given(st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_an_interval_holds_its_estimate_and_never_closes(solved: list[int]) -> None:
    for one in estimates_by_k([(each, 4) for each in solved], 4).values():
        assert 0 <= one.low <= one.value <= one.high <= 1
        assert one.high - one.low > 0.05


def test_single_attempts_get_wilsons_interval() -> None:
    one = estimates_by_k([(1, 1)] * 7 + [(0, 1)] * 3, 1)[1]
    # Wilson's interval of a share of 0.7 in 9: one degree of freedom less than attempts.
    assert (one.low, one.high) == pytest.approx((0.3825, 0.8979), abs=1e-4)


@pytest.mark.parametrize("num_tasks", [16, 64])
def test_intervals_hold_the_truth_about_as_often_as_they_say(num_tasks: int) -> None:
    rng, held = np.random.default_rng(0), [0, 0]
    for _ in range(600):
        chances = rng.beta(0.6, 0.6, num_tasks)
        before = {str(i): (int(n), 4) for i, n in enumerate(rng.binomial(4, chances))}
        better = np.minimum(1.0, chances + 0.1)
        after = {str(i): (int(n), 4) for i, n in enumerate(rng.binomial(4, better))}
        # Tasks are drawn from what the interval speaks of: their mean is 1/2.
        one = estimates_by_k(list(before.values()), 4)[1]
        held[0] += one.low <= 0.5 <= one.high
        found = compare(before, after, 0)
        held[1] += found.difference.low <= np.mean(better - chances) <= found.difference.high
    assert all(0.92 <= count / 600 <= 0.995 for count in held)


def test_versions_are_compared_task_by_task() -> None:
    before = {"a": (0, 1), "b": (0, 1), "c": (1, 1), "d": (1, 1), "only": (1, 1)}
    after = {"a": (1, 1), "b": (1, 1), "c": (0, 1), "d": (1, 1), "new": (0, 1)}
    found = compare(before, after, 3)
    assert (found.policy_version, found.difference.num_tasks) == (3, 4)
    assert (found.num_better, found.num_worse, found.difference.value) == (2, 1, 0.25)
    assert found.difference.low < 0 < found.difference.high
    assert compare(before, {}, 3) is None
    same = compare(before, before, 3)
    assert same.difference.value == 0 and same.p_value == 1


def test_the_sign_test_is_the_binomial_one() -> None:
    # R: binom.test(9, 10)$p.value, binom.test(5, 5)$p.value.
    assert sign_test(9, 1) == pytest.approx(0.021484375)
    assert sign_test(0, 5) == pytest.approx(0.0625)
    assert sign_test(3, 3) == 1.0


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
    assert completed.intervals.keys() == {1, 2} and completed.comparison is None


def test_an_evaluation_is_compared_with_the_first_of_its_set() -> None:
    book = EvalBook()
    results = {}
    for version, solved in ((0, (0, 0, 1)), (4, (1, 1, 1)), (8, (1, 1, 0))):
        for name in ("", "other"):
            eval_id = f"v{version}-{name}"
            announced = EvalAnnounced(
                eval_id=eval_id, policy_version=version, num_tasks=3, eval_set=name,
                # A set whose tasks became others: nothing is paired.
                categories=[str(version)] if name else [],
            )  # fmt: skip
            book.announce(announced)
            for index, is_solved in enumerate(solved):
                results[version, name] = book.add(
                    Verdict(
                        rollout_id=f"e{eval_id}-{index}", group_id=eval_id, group_index=0,
                        purpose=Purpose.EVAL, judge="j", judge_version="1", reward=0.0,
                        outcome=Outcome.SOLVED if is_solved else Outcome.FAILED,
                    )
                )  # fmt: skip
    assert results[0, ""].comparison is None
    later = [results[version, ""].comparison for version in (4, 8)]
    assert [one.policy_version for one in later] == [0, 0]
    assert [(one.num_better, one.num_worse) for one in later] == [(2, 0), (2, 1)]
    assert all(results[version, "other"].comparison is None for version in (0, 4, 8))


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
