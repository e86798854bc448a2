"""Which versions are evaluated, and how verdicts are counted."""

from penstock.actors.evaluator.evaluation import EvalBook
from penstock.actors.evaluator.schedule import EvalSchedule
from penstock.messages.reward import EvalRequested, Outcome, Verdict
from penstock.messages.task import Purpose

REQUEST = EvalRequested(eval_id="v0", policy_version=0, num_tasks=4)


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


def test_version_is_due_when_all_replicas_serve_it() -> None:
    schedule = EvalSchedule(0, ["west-0", "east-0"])
    schedule.applied("west-0", 0)
    schedule.make_due(0)
    assert schedule.take_due() == []
    schedule.applied("stranger", 9)
    schedule.applied("east-0", 0)
    assert schedule.take_due() == [0]
    assert schedule.take_due() == []


def test_period_and_end() -> None:
    schedule = EvalSchedule(2, ["west-0"])
    schedule.make_due(0)
    for version in range(1, 6):
        schedule.stepped(version)
    schedule.make_due(5)
    schedule.applied("west-0", 3)
    assert schedule.take_due() == [0, 2]
    schedule.applied("west-0", 5)
    schedule.applied("west-0", 4)
    assert schedule.take_due() == [4, 5]


def test_without_period_only_first_and_last() -> None:
    schedule = EvalSchedule(0, [])
    schedule.make_due(0)
    for version in range(1, 4):
        schedule.stepped(version)
    assert schedule.take_due() == [0]
    schedule.make_due(3)
    assert schedule.take_due() == [3]


def test_masked_verdicts_are_left_out_of_the_rate() -> None:
    book = EvalBook()
    assert book.request(REQUEST, now=0.0) is None
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
    completed = book.request(REQUEST, now=0.0)
    assert completed is not None
    assert completed.num_solved == 4


def test_missing_verdicts_are_masked_at_the_deadline() -> None:
    book = EvalBook()
    book.request(REQUEST, now=100.0)
    book.add(make_verdict(0, Outcome.SOLVED))
    assert book.expire(now=110.0, deadline_s=10.0) == []
    [completed] = book.expire(now=110.1, deadline_s=10.0)
    assert (completed.num_solved, completed.num_tasks, completed.num_masked) == (1, 1, 3)
    assert book.expire(now=200.0, deadline_s=10.0) == []


def test_result_on_the_log_is_not_given_again() -> None:
    book = EvalBook()
    book.completed("v0")
    book.request(REQUEST, now=0.0)
    for index in range(4):
        assert book.add(make_verdict(index, Outcome.SOLVED)) is None
    assert book.expire(now=1e9, deadline_s=1.0) == []
