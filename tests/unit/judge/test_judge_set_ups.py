"""What a task's set-up made is the task's, and what the policy made of it is the policy's."""

import msgspec
import pytest
from tests.trajectories import trajectory

from penstock.actors.judge.audit import audit
from penstock.actors.judge.hidden_tests import settle
from penstock.actors.judge.set_ups import own_changes
from penstock.actors.judge.submission import read_submission
from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.envs.tasks.storage import GradedTask
from penstock.messages.reward import CheatKind, Outcome
from penstock.messages.rollout import EpisodeEnd
from penstock.messages.task import HiddenTests, Purpose, Split, Task, TaskStep

HIDDEN = HiddenTests(
    task_id="t", files={"tests/_hidden.py": "print(1)"}, argv=["python3"], expected=["1"]
)
MADE = {
    "conftest.py": b"x = 1\n", "lib.so": b"\x7fELF", "tests/_hidden/a.txt": b"a",
    "m.py": b"new\n", "setup.sh": None,
}  # fmt: skip
"""It changed a file of the task, and removed itself."""
AS_MADE = {path: data for path, data in MADE.items() if data is not None}
TASK = GradedTask(
    task=Task(
        task_id="t", category="c", split=Split.TRAIN, instruction="", has_setup=True,
        files={"m.py": "old\n", "setup.sh": ""},
        steps=[TaskStep(instruction="next", files={"n.py": "n\n"}, has_setup=True)],
    ),
    hidden=msgspec.structs.replace(HIDDEN, steps=[HIDDEN]),
    made=[MADE, MADE | {"pytest.ini": b"[pytest]\n"}],
)  # fmt: skip
UNKNOWN = msgspec.structs.replace(TASK, made=[])


def left(files: dict[str, bytes], *deleted: str):
    return trajectory(
        rollout_id="r", group_id="g", group_index=0, group_size=1, member=0, task_id="t",
        purpose=Purpose.TRAIN, category="c", end=EpisodeEnd.FINISHED, files=files,
        deleted=list(deleted),
    )  # fmt: skip


def decisive(rollout, task: GradedTask) -> list[tuple[CheatKind, str]]:
    return [(one.kind, one.where) for one in audit(rollout, task) if one.is_decisive]


def test_what_a_set_up_made_is_no_sign() -> None:
    rollout = left(AS_MADE, "setup.sh")
    assert len(decisive(rollout, UNKNOWN.at_step(0))) == 2
    settled = settle(rollout, UNKNOWN.at_step(0))
    assert settled is not None and settled.outcome is Outcome.POLICY_ERROR
    assert decisive(rollout, TASK.at_step(0)) == []
    assert settle(rollout, TASK.at_step(0)) is None
    later = left(AS_MADE | {"pytest.ini": b"[pytest]\n"}, "setup.sh")
    assert decisive(later, TASK.at_step(0)) == [(CheatKind.INTERPRETER, "file pytest.ini")]
    assert decisive(later, TASK.at_step(1)) == []


@pytest.mark.parametrize("content", [b"x = 2\n", b"", b"x = 1\n\n"])
def test_what_the_policy_made_of_it_is_one(content) -> None:
    changed = left(AS_MADE | {"conftest.py": content}, "setup.sh")
    assert decisive(changed, TASK.at_step(0)) == [(CheatKind.INTERPRETER, "file conftest.py")]
    moved = left(AS_MADE | {"sub/conftest.py": b"x = 1\n"}, "setup.sh")
    assert decisive(moved, TASK.at_step(0)) == [(CheatKind.INTERPRETER, "file sub/conftest.py")]


def test_its_deletion_is_one_where_it_ran_by_itself() -> None:
    gone = left({path: AS_MADE[path] for path in ("m.py", "lib.so")}, "setup.sh")
    assert decisive(gone, TASK.at_step(0)) == [(CheatKind.INTERPRETER, "file conftest.py")]


def test_changes_are_against_what_the_policy_found() -> None:
    assert own_changes(left(AS_MADE, "setup.sh"), TASK.at_step(0)).files == {}
    undone = own_changes(left({"lib.so": AS_MADE["lib.so"]}), TASK.at_step(0))
    assert undone.files == {"m.py": b"old\n", "setup.sh": b""}
    assert undone.finished.deleted == ["conftest.py", "tests/_hidden/a.txt"]
    mine = own_changes(left(AS_MADE | {"m.py": b"mine\n"}, "setup.sh", "n.py"), TASK.at_step(1))
    assert mine.files == {"m.py": b"mine\n"}
    assert mine.finished.deleted == ["n.py", "pytest.ini"]
    as_it_is = left({"m.py": b"mine\n"}, "setup.sh")
    assert own_changes(as_it_is, UNKNOWN.at_step(0)) == as_it_is


def test_other_judges_see_the_policys_changes_alone() -> None:
    chat = PenstockChat(train_tokenizer(["look at m.py"], vocab_size=300))
    done = read_submission(left(AS_MADE | {"m.py": b"mine\n"}, "setup.sh"), TASK, chat)
    assert [(one.path, one.before, one.after) for one in done.files] == [
        ("m.py", "new\n", "mine\n")
    ]
