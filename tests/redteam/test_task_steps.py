"""Tasks of several steps, attacked: by their folders, by stored objects, by the policy."""

import os

import msgspec
import pytest

from penstock.envs.tasks.harbor import steps
from penstock.envs.tasks.harbor.folder import BYTES_MAX, MalformedTaskError
from penstock.envs.tasks.harbor.read import read_harbor
from penstock.envs.tasks.storage import GradedTask

NAMES = ("one", "two", "three")


@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "task"
    tables = "".join(f'[[steps]]\nname = "{name}"\n' for name in NAMES)
    write(root, {"task.toml": f'version = "1.4"\n{tables}', "environment/start.txt": "x"})
    for name in NAMES:
        parts = {"instruction.md": name, "tests/test.sh": "true", "solution/solve.sh": "true"}
        write(root, {f"steps/{name}/{path}": text for path, text in parts.items()})
    return root


def write(root, files):
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def refused(folder, words):
    with pytest.raises(MalformedTaskError, match=words):
        read_harbor(folder)


BAD_NAMES = (
    "..",
    ".",
    "",
    " ",
    "a/b",
    "/etc",
    "../../etc",
    "a\\\\b",
    "a\\u0000b",
    "two.",
    "x" * 256,
)


@pytest.mark.parametrize("name", [*BAD_NAMES, "\\u202etwo", "ONE", "nul.x"])
def test_a_step_s_name_is_one_folder_s(folder, name):
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace('"two"', f'"{name}"'))
    refused(folder, r"task\.toml: steps\[1\]\.name: expected the portable name of a folder")


@pytest.mark.parametrize("name", ["$(id)", "-rf", "a'b; id", "%s{0}"])
def test_a_step_s_name_is_no_shell_s(folder, name):
    (folder / "steps" / "two").rename(folder / "steps" / name)
    text = (folder / "task.toml").read_text()
    (folder / "task.toml").write_text(text.replace('"two"', f'"{name}"'))
    candidate = read_harbor(folder)
    texts = [one.gold_files["/solution/solve.sh"] for one in candidate.hidden.steps]
    assert not any(name in text for text in (*texts, *candidate.hidden.argv))


@pytest.mark.parametrize(
    "value", ["nan", "inf", "-inf", "1e9", "true", '"1"', "[1]", "{reward = nan}"]
)
def test_a_least_reward_is_a_finite_number(folder, value):
    with (folder / "task.toml").open("a") as file:
        file.write(f"min_reward = {value}\n")
    refused(folder, r"task\.toml: steps\[2\]\.min_reward: expected a number")


def test_steps_are_bounded_in_number(folder):
    with (folder / "task.toml").open("a") as file:
        file.writelines(f'[[steps]]\nname = "s{number}"\n' for number in range(5_000))
    refused(folder, r"task\.toml: steps: Expected `array` of length <= 32")


def test_what_all_steps_ask_and_write_is_bounded_together(folder):
    text = "x" * (BYTES_MAX // 4)
    for name in NAMES[:2]:
        write(folder, {f"steps/{name}/instruction.md": text, f"steps/{name}/workdir/{name}": text})
    refused(
        folder, rf"steps: expected at most {BYTES_MAX} bytes of instructions and files together"
    )
    (folder / "steps/two/workdir/two").unlink()
    read_harbor(folder)


def test_what_all_steps_hide_is_bounded_together(folder, monkeypatch):
    """Each step may have its own tests and solution."""
    monkeypatch.setattr(steps, "HIDDEN_BYTES_MAX", 5_000)
    write(folder, {"steps/one/solution/data": "x" * 2_500})
    read_harbor(folder)
    write(folder, {"steps/two/solution/data": "x" * 2_500})
    refused(folder, r"steps: expected at most 5000 bytes of tests and solutions together")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("steps/one/workdir/a", "steps/two/workdir/a/b"),
        ("steps/one/workdir/a/b/c", "steps/three/workdir/a/b"),
        ("environment/files/a", "steps/one/workdir/a/b"),
    ],
)
def test_no_step_needs_a_folder_where_another_has_a_file(folder, first, second):
    """Else no policy could go on after it, and each would be told that it was its own fault."""
    write(folder, {first: "x"})
    read_harbor(folder)
    write(folder, {second: "x"})
    refused(
        folder, r"task: steps\[[0-2]\]: a[/b]*: expected no file where another step has a folder"
    )


def _replaced(path, make):
    return lambda folder: ((folder / path).rename(folder / "moved"), make(folder / path))


PLACES = {
    "a step that is a link": _replaced("steps/two", lambda path: path.symlink_to("../moved")),
    "steps that are a link": _replaced("steps", lambda path: path.symlink_to("moved")),
    "tests that are a link": _replaced(
        "steps/two/tests", lambda path: path.symlink_to("../../moved")
    ),
    "a link to nothing": lambda f: (f / "steps/two/workdir").symlink_to("nowhere"),
    "a link in a circle": lambda f: (f / "steps/two/workdir").symlink_to("workdir"),
    "a file for a folder": lambda f: write(f, {"steps/two/workdir": "x"}),
    "a pipe for a folder": lambda f: os.mkfifo(f / "steps/two/workdir"),
    "a pipe for an instruction": lambda f: (
        (f / "steps/two/instruction.md").unlink(), os.mkfifo(f / "steps/two/instruction.md")
    ),
    "an instruction of blanks": lambda f: write(f, {"steps/two/instruction.md": " \n\t"}),
    "a prior conversation": lambda f: write(f, {"steps/two/trajectory.json": "{}"}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACES)
def test_a_hostile_step_is_refused_by_its_file(folder, name):
    read_harbor(folder)
    PLACES[name](folder)
    refused(folder, r"/task/steps")


def test_what_a_later_step_hides_is_not_in_what_is_sent_to_workers(folder):
    secret = "the-hidden-answer"
    write(folder, {"steps/three/tests/answer": secret, "steps/three/solution/answer": secret})
    candidate = read_harbor(folder)
    assert secret.encode() not in msgspec.msgpack.encode(candidate.task)
    assert secret.encode() in msgspec.msgpack.encode(candidate.hidden)
    graded = GradedTask(task=candidate.task, hidden=candidate.hidden)
    for step in range(2):
        assert secret.encode() not in msgspec.msgpack.encode(graded.at_step(step).hidden.files)


def test_a_step_is_audited_by_all_that_was_asked_by_then(folder):
    """A policy whose task names the verifier's files may name them, too: no sign of cheating."""
    write(folder, {"steps/two/instruction.md": "Write a tool that reads /logs/verifier"})
    candidate = read_harbor(folder)
    graded = GradedTask(task=candidate.task, hidden=candidate.hidden)
    asked = [graded.at_step(step).task.instruction for step in range(3)]
    assert asked[0] == "one"
    assert asked[1] == "one\n\nWrite a tool that reads /logs/verifier"
    assert asked[2] == f"{asked[1]}\n\nthree"
