"""Evaluations one by one, and how verdicts are counted."""

import msgspec

from penstock.actors.evaluator.evaluation import EvalBook
from penstock.messages.reward import EvalAnnounced, Outcome, Verdict
from penstock.messages.task import Purpose

REQUEST = EvalAnnounced(eval_id="v0", policy_version=0, num_tasks=4)


def make_verdict(index: int, outcome: Outcome, category: str = "easy") -> Verdict:
    return Verdict(
        rollout_id=f"ev0-{index}",
        group_id="v0",
        group_index=0,
        purpose=Purpose.EVAL,
        judge="hidden_tests",
        judge_version="1",
        outcome=outcome,
        reward=0.0,
        category=category,
    )


def test_masked_verdicts_are_left_out_of_the_rate() -> None:
    book = EvalBook()
    assert book.announce(REQUEST) is None
    assert book.add(make_verdict(0, Outcome.SOLVED)) is None
    assert book.add(make_verdict(0, Outcome.FAILED)) is None  # a second verdict changes nothing
    assert book.add(make_verdict(1, Outcome.FAILED)) is None
    assert book.add(make_verdict(2, Outcome.INFRASTRUCTURE_ERROR)) is None
    completed = book.add(make_verdict(3, Outcome.TIMEOUT, category="hard"))
    assert completed is not None
    assert (completed.num_solved, completed.num_tasks, completed.num_masked) == (1, 3, 1)
    assert completed.pass_rate_by_category == {"easy": 0.5, "hard": 0.0}
    assert book.add(make_verdict(4, Outcome.SOLVED)) is None


def test_verdicts_before_the_request_count() -> None:
    book = EvalBook()
    for index in range(4):
        assert book.add(make_verdict(index, Outcome.SOLVED)) is None
    completed = book.announce(REQUEST)
    assert completed is not None
    assert completed.num_solved == 4


def test_missing_verdicts_are_masked_at_the_deadline() -> None:
    book = EvalBook()
    book.announce(REQUEST)
    assert book.to_request(now=100.0) == REQUEST
    book.add(make_verdict(0, Outcome.SOLVED))
    assert book.expire(now=110.0, deadline_s=10.0) is None
    completed = book.expire(now=110.1, deadline_s=10.0)
    assert completed is not None
    assert (completed.num_solved, completed.num_tasks, completed.num_masked) == (1, 1, 3)
    assert book.expire(now=200.0, deadline_s=10.0) is None


def test_evaluations_come_one_by_one_and_a_later_one_waits_without_ageing() -> None:
    book = EvalBook()
    later = EvalAnnounced(eval_id="v3", policy_version=3, num_tasks=1)
    book.announce(later)
    book.announce(REQUEST)
    assert book.to_request(now=0.0) == REQUEST
    book.requested("v0")
    assert book.to_request(now=5.0) is None
    assert book.expire(now=50.0, deadline_s=10.0) is not None
    assert book.to_request(now=50.0) == later
    assert book.expire(now=60.0, deadline_s=10.0) is None


def test_a_verdict_of_any_other_version_is_not_counted_and_is_told() -> None:
    book = EvalBook()
    book.announce(REQUEST)
    versions = [(0, 0), (0, 1), (1, 1), (0, 0)]
    for index, (oldest, newest) in enumerate(versions):
        verdict = make_verdict(index, Outcome.SOLVED)
        completed = book.add(
            msgspec.structs.replace(verdict, policy_version=oldest, policy_version_max=newest)
        )
    assert completed is not None
    assert (completed.num_solved, completed.num_tasks) == (2, 2)
    assert (completed.num_wrong_version, completed.num_masked) == (2, 0)


def test_result_on_the_log_is_not_given_again() -> None:
    book = EvalBook()
    book.completed("v0")
    book.announce(REQUEST)
    for index in range(4):
        assert book.add(make_verdict(index, Outcome.SOLVED)) is None
    assert book.expire(now=1e9, deadline_s=1.0) is None
