"""Parts of a reward: what a foreign verifier prints, and what may earn one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.judge.test_judge_compose import TASK, make_rollout

from penstock.actors.judge.hidden_tests import settle, weigh
from penstock.actors.judge.reward import Findings
from penstock.envs.tasks.harbor.folder import plain_tree
from penstock.envs.tasks.harbor.foreign import Verifier, foreign_hidden, read_fraction
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.reward import CheatFinding, CheatKind, Outcome
from penstock.messages.sandbox import ExecResult

FOREIGN = foreign_hidden(
    "t", plain_tree({"test.sh": b"exit"}), {}, Verifier(env={}, timeout_s=9.0, is_separated=True)
)


def fraction(stdout: bytes, hidden=FOREIGN, **changes) -> float | None:
    return read_fraction(ExecResult(**{"exit_code": 0, "stdout": stdout, **changes}), hidden)


@pytest.mark.parametrize(
    ("stdout", "expected"),
    [
        (b"0.5\n", 0.5),
        (b"noise\n0.6666666666666666\n", 0.6666666666666666),
        (b"1e-05\n", 1e-05),
        (b"2.5e-07", 2.5e-07),
        (b"0.5\nnoise\n", None),
        *((text, None) for text in (b"1\n", b"0.0\n", b"1.0\n", b"1.5\n", b"-0.5\n", b"")),
        *((text, None) for text in (b"nan\n", b"inf\n", b"no reward\n", b"0.5 \n", b".5\n")),
        *((text, None) for text in (b"0.1.2\n", b"0.5e9\n", b"0_1.5\n", b"\xff\n", b"1e-999\n")),
    ],
)
def test_a_part_of_a_reward_is_a_number_between_none_and_all_of_it(stdout, expected) -> None:
    assert fraction(stdout) == expected


@given(st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_every_part_that_python_prints_is_read(value: float) -> None:
    assert fraction(f"{value}\n".encode()) == value


@pytest.mark.parametrize("fault", [{"exit_code": 1}, {"timed_out": True}, {"truncated": True}])
def test_a_run_that_was_cut_gives_no_part(fault: dict) -> None:
    assert fraction(b"0.5\n", **fault) is None


def test_tests_of_our_own_give_no_part() -> None:
    assert fraction(b"0.5\n", TASK.hidden) is None


def test_a_verifier_that_gives_parts_is_run_on_unchanged_files_too() -> None:
    unchanged = Trajectory(finished=make_rollout(), turns=[], files={})
    assert settle(unchanged, TASK) is not None
    assert settle(unchanged, GradedTask(task=TASK.task, hidden=FOREIGN)) is None


def test_a_part_that_was_won_by_cheating_is_the_policys_fault() -> None:
    cheat = CheatFinding(kind=CheatKind.CANARY, where="file a", detail="x", is_decisive=True)
    for score, expected in ((0.5, Outcome.POLICY_ERROR), (None, Outcome.FAILED)):
        found = weigh(Findings(outcome=Outcome.FAILED, score=score), [cheat])
        assert found.outcome is expected
