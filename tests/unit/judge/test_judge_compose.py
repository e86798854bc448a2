"""From findings to rewards."""

import pytest

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.hidden_tests import touched_hidden_files
from penstock.actors.judge.judges import make_judge
from penstock.actors.judge.reward import Findings, outcome_of_end, reward_components
from penstock.envs.tasks.gates import read_report
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.errors import ConfigError
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.reward import Lengths, Outcome
from penstock.messages.rollout import EpisodeEnd, EpisodeFiles, RolloutFinished
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import HiddenTests, Purpose, Split, Task

CONFIG = JudgeConfig()
TASK = GradedTask(
    task=Task(
        task_id="t",
        category="r",
        split=Split.TRAIN,
        instruction="Fix f",
        files={"m.py": "", "n/k.py": ""},
    ),
    hidden=HiddenTests(task_id="t", files={"tests/_hidden.py": ""}, argv=["python3"]),
)


def make_rollout(**changes: object) -> RolloutFinished:
    fields: dict = {
        "rollout_id": "g0-m0", "group_id": "g0", "group_index": 0, "group_size": 1, "member": 0,
        "purpose": Purpose.TRAIN, "task_id": "t", "category": "r", "end": EpisodeEnd.FINISHED,
        "turns": [], "files": EpisodeFiles(),
    }  # fmt: skip
    return RolloutFinished(**{**fields, **changes})


@pytest.mark.parametrize("outcome", list(Outcome))
def test_masked_outcomes_have_no_reward_and_faults_have_the_least(outcome: Outcome) -> None:
    findings = Findings(outcome=outcome, lengths=Lengths(num_calls=3))
    components = reward_components(findings, CONFIG)
    assert (components == {}) == outcome.is_masked
    if outcome in {Outcome.POLICY_ERROR, Outcome.TIMEOUT}:
        assert components == {"policy_fault": CONFIG.reward_min}
    if outcome is Outcome.SOLVED:
        assert components["tests"] == CONFIG.reward_solved
        assert components["length_penalty"] < 0
    assert outcome.is_masked or sum(components.values()) >= CONFIG.reward_min


def test_ends_that_say_it_all() -> None:
    settled = {end: outcome_of_end(end) for end in EpisodeEnd if outcome_of_end(end)}
    assert settled == {
        EpisodeEnd.TIME_LIMIT: Outcome.TIMEOUT,
        EpisodeEnd.POLICY_ERROR: Outcome.POLICY_ERROR,
        EpisodeEnd.INFRASTRUCTURE_ERROR: Outcome.INFRASTRUCTURE_ERROR,
        EpisodeEnd.CANCELLED: Outcome.CANCELLED,
    }


@pytest.mark.parametrize(
    ("stdout", "exit_code", "expected"),
    [
        (b"1\n'a b'\n[]\n", 0, (3, True)),
        (b"printed\n1\n'a b'\n[]\n", 0, (3, True)),
        (b"1\n'a b'\n[]\n", 1, (3, False)),
        (b"1\n'a b'\n[0]\n", 0, (2, False)),
        (b"1\n'a b'\n[]\nmore\n", 0, (0, False)),
        (b"'a b'\n[]\n", 0, (0, False)),
        (b"", 0, (0, False)),
        (b"\xff\n'a b'\n[]\n", 0, (2, False)),
    ],
)
def test_report(stdout: bytes, exit_code: int, expected: tuple[int, bool]) -> None:
    report = read_report(ExecResult(exit_code=exit_code, stdout=stdout), ["1", "'a b'", "[]"])
    assert report.num_tests == 3
    assert (report.num_passed, report.is_solved) == expected


def test_a_program_of_no_tests_solves_nothing() -> None:
    assert not read_report(ExecResult(exit_code=0, stdout=b"1\n"), []).is_solved


@pytest.mark.parametrize("fault", ["timed_out", "truncated"])
def test_a_run_that_was_cut_is_not_solved(fault: str) -> None:
    done = ExecResult(exit_code=0, stdout=b"1\n", **{fault: True})
    assert not read_report(done, ["1"]).is_solved


@pytest.mark.parametrize(
    ("path", "is_refused"),
    [
        ("m.py", False),
        ("tests/other.py", False),
        ("n/k.py", False),
        ("tests/_hidden.py", True),
        ("tests", True),
        ("tests/_hidden/__init__.py", True),
        ("tests/_hidden.py/x", True),
        ("other/_hidden.py", False),
        ("n/../tests/_hidden.py", True),
        ("/work/tests/_hidden.py", True),
    ],
)
def test_hidden_tests_cannot_be_overwritten_or_shadowed(path: str, is_refused: bool) -> None:
    rollout = Trajectory(finished=make_rollout(), turns=[], files={path: b""})
    assert touched_hidden_files(rollout, TASK) == ([path] if is_refused else [])


def test_unknown_judge_names_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"'vibes' is none of .*hidden_tests"):
        make_judge(JudgeConfig(judge="vibes"))


def test_rewards_that_pay_for_faults_are_refused() -> None:
    with pytest.raises(ValueError, match="reward_min"):
        JudgeConfig(reward_min=0.5)
