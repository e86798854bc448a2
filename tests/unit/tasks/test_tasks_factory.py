import ast
import asyncio
import dataclasses
import random
import subprocess
import sys
from contextlib import asynccontextmanager

import msgspec
import pytest
from tests.ladder import MAKE as QUICKSTART
from tests.unit.tasks.host_pair import run_apart

from penstock.envs.factory.bug_injection import InjectConfig
from penstock.envs.factory.commit_tasks import CommitSource
from penstock.envs.factory.factory import Bounds, Factory, open_source
from penstock.envs.factory.modules import folder_modules, needed_files, package_modules
from penstock.envs.factory.mutation_operators import draw_bugs, without_body
from penstock.envs.factory.recording import ARGV, PROGRAM_FILE, is_informative, program
from penstock.envs.factory.splits import SplitBy, SplitLeakError, check_no_leak, split_tasks
from penstock.envs.factory.targets import find_targets, function_digest, promise
from penstock.envs.tasks.gates import SuiteReport, check_candidate, read_report, write_solution
from penstock.envs.tasks.source import Rejection, TaskRejectedError, difficulty, difficulty_label
from penstock.examples.quickstart.ladder.generate import LadderSource, Selection, draw_repositories
from penstock.infra.tasks.actions import OwnSource
from penstock.messages.errors import NotFoundError
from penstock.messages.sandbox import ExecResult
from penstock.messages.task import Split

SHAPES = '''\
"""Shapes."""
# a comment that stays


def clamp(n, low=0, high=10):
    """Return n, at least low and at most high.

    >>> clamp(12)
    10
    """
    if n < low:  # below
        return low
    return min(n, high) + 0 * (low + high)


def speak(text):
    print(text)


class Box:
    def __init__(self, width, height):
        self.width, self.height = width, height

    def area(self, count):
        """Return the area of some boxes."""
        return self.width * self.height * count
'''


class HostLab:
    """A lab of host processes, for code that these tests wrote; its own bench."""

    def __init__(self, folder):
        self.folder = folder

    @asynccontextmanager
    async def bench(self):
        yield self

    async def run(self, files, argv, variants):
        return [
            done.stdout.decode().removesuffix("\n").split("\n") if done.exit_code == 0 else None
            for variant in variants
            for done in [self.exec({**files, **variant}, argv)]
        ]

    async def test(self, task, hidden, changes):
        files = {**task.files, **changes}
        done = run_apart(self.folder, hidden.argv, hidden.peer, files, hidden.files)
        return done.stdout.decode().removesuffix("\n").split("\n")

    async def solve(self, task, is_gold):
        return await write_solution(task, is_gold)

    async def grade(self, task, hidden, changes):
        changes = {path: data.decode() for path, data in changes.files.items()}
        if hidden.peer:
            files = {**task.files, **changes}
            done = run_apart(self.folder, hidden.argv, hidden.peer, files, hidden.files)
        else:
            done = self.exec({**task.files, **changes, **hidden.files}, hidden.argv)
        return read_report(done, hidden.expected)

    def exec(self, files, argv):
        for path, text in files.items():
            place = self.folder / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
        command = [sys.executable, *argv[1:]]
        done = subprocess.run(command, cwd=self.folder, capture_output=True, check=False)
        return ExecResult(exit_code=done.returncode, stdout=done.stdout)


def shapes(tmp_path):
    folder = tmp_path / "shapes"
    folder.mkdir()
    (folder / "shapes.py").write_text(SHAPES)
    return folder


async def made(tmp_path, num_max=100):
    lab = tmp_path / "lab"
    lab.mkdir()
    bounds = Bounds(num_tasks_max=num_max, num_concurrent=1)
    factory = Factory(HostLab(lab), bounds, lambda text: None)
    source = open_source(str(shapes(tmp_path)), InjectConfig(seed=3, bugs_per_function=1))
    return factory, await factory.make([source])


@pytest.fixture(scope="module")
def shapes_set(tmp_path_factory):
    return asyncio.run(made(tmp_path_factory.mktemp("shapes")))


def test_a_folder_gives_gated_bugs_and_features(shapes_set):
    factory, tasks = shapes_set
    kinds = {(one.origin.function, one.origin.kind) for one in tasks}
    assert ("clamp", "feature") in kinds and ("clamp", "bug") in kinds
    assert factory.counts.num_tasks == len(tasks)
    for one in tasks:
        assert one.hidden.gold_files == {"shapes.py": SHAPES}
        assert "# a comment that stays" in one.task.files["shapes.py"]
        assert not any(line in one.hidden.files[PROGRAM_FILE] for line in ["raised TypeError"])
        shown = [line for line in one.task.instruction.splitlines() if line.startswith("    ")]
        assert not any(repr(line.strip()) in one.hidden.files[PROGRAM_FILE] for line in shown)


async def test_the_factory_stops_at_the_wanted_number_and_counts_what_falls(tmp_path):
    factory, tasks = await made(tmp_path, num_max=1)
    assert len(tasks) == factory.counts.num_plans == 1


class FixedGrader:
    def __init__(self, null, gold):
        self.reports = {False: iter(null), True: iter(gold)}

    async def grade(self, task, hidden, changes):
        solved = next(self.reports[bool(changes)])
        return SuiteReport(num_passed=int(solved), num_tests=1, is_solved=solved)


@pytest.mark.parametrize(
    ("null", "gold", "reason"),
    [
        ([True, True], [True, True], Rejection.NULL_PASSES),
        ([False, False], [False, True], Rejection.GOLD_FAILS),
        ([False, False], [True, False], Rejection.FLAKY),
        ([False, True], [True, True], Rejection.FLAKY),
    ],
)
async def test_each_gate_closes(null, gold, reason):
    candidate = next(ladder(1).candidates())
    with pytest.raises(TaskRejectedError) as caught:
        await check_candidate(candidate, FixedGrader(null, gold).grade)
    assert caught.value.reason is reason


async def test_a_sound_task_passes_its_gates():
    candidate = next(ladder(1).candidates())
    await check_candidate(candidate, FixedGrader([False, False], [True, True]).grade)


def ladder(num, seed="train/0"):
    rng = random.Random(seed)
    return LadderSource(Split.TRAIN, num, Selection(), rng, "train")


def test_the_ladder_is_the_same_through_the_factory():
    drawn = list(draw_repositories(Split.TRAIN, 12, Selection(), random.Random("train/0"), "train"))
    made = list(ladder(12).candidates())
    assert [one.task for one in made] == [one.task for one in drawn]
    assert [one.hidden for one in made] == [one.hidden for one in drawn]


def drawn_with(monkeypatch, **changed):
    """Return a source of the ladder whose one task was changed."""
    (one,) = draw_repositories(Split.TRAIN, 1, Selection(), random.Random(0), "train")
    parts = {name: change(one) for name, change in changed.items()}
    monkeypatch.setattr(
        "penstock.examples.quickstart.ladder.generate.draw_repositories",
        lambda *_: iter([dataclasses.replace(one, **parts)]),
    )
    return ladder(1)


def test_a_run_s_ladder_goes_through_the_same_gates(monkeypatch):
    fixed = drawn_with(
        monkeypatch,
        task=lambda one: msgspec.structs.replace(
            one.task, files=one.task.files | one.hidden.gold_files
        ),
    )
    with pytest.raises(TaskRejectedError, match=Rejection.NULL_PASSES):
        list(fixed.candidates())
    hopeless = drawn_with(
        monkeypatch, hidden=lambda one: msgspec.structs.replace(one.hidden, gold_files={})
    )
    with pytest.raises(TaskRejectedError, match=Rejection.GOLD_FAILS):
        list(hopeless.candidates())


async def test_plans_of_own_code_need_no_machine():
    plans = list(OwnSource(f"{QUICKSTART}ladder_tasks", num=2, seed=0).plans())
    made = [one for plan in plans for one in await plan.draft(None)]
    assert [one.task.task_id for one in made] == [plan.name for plan in plans]
    assert len(made) == 2


def test_bugs_change_one_place_and_leave_the_rest():
    tree = ast.parse(SHAPES)
    target = next(find_targets(tree))
    bugs = draw_bugs(SHAPES, target, random.Random(0), 20)
    assert len({bug.source for bug in bugs}) == len(bugs) > 8
    assert {"comparison", "constant", "call", "operator", "condition"} <= {b.kind for b in bugs}
    for bug in bugs:
        ast.parse(bug.source)
        changed = sum(
            a != b for a, b in zip(SHAPES.splitlines(), bug.source.splitlines(), strict=True)
        )
        assert changed == 1


def test_a_deleted_body_keeps_signature_and_docstring():
    target = next(find_targets(ast.parse(SHAPES)))
    text = without_body(SHAPES, target)
    assert "def clamp(n, low=0, high=10):" in text and ">>> clamp(12)" in text
    assert "raise NotImplementedError" in text and "# below" not in text
    assert "class Box" in text


def test_a_digest_is_of_the_code_and_not_of_its_names():
    first, second, third = (
        ast.parse(f"def {name}({arg}):\n    '''{doc}'''\n    return {arg} + {number}\n").body[0]
        for name, arg, doc, number in [("f", "x", "a", 1), ("g", "yy", "b", 1), ("f", "x", "a", 2)]
    )
    assert function_digest(first) == function_digest(second) != function_digest(third)


def test_what_speaks_to_the_outside_promises_nothing():
    promises = {one.qualname: promise(one) for one in find_targets(ast.parse(SHAPES))}
    assert promises["clamp"] > promises["Box.area"] > 0
    assert promises.get("speak", 0) == 0


def test_lines_about_places_and_misuse_tell_nothing():
    assert is_informative("[1, 2]") and is_informative("raised ValueError")
    assert not is_informative("<object object at 0x7f>") and not is_informative("raised TypeError")


def test_a_call_that_does_not_end_is_stopped(tmp_path):
    (tmp_path / "m.py").write_text("def f(n):\n    while n:\n        pass\n    return n\n")
    (tmp_path / PROGRAM_FILE).write_text(program("m", ["f(0)", "f(1)", "f([])", "exit(0)"]))
    done = subprocess.run(
        [sys.executable, *ARGV[1:]], cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines() == ["0", "raised TimeLimit", "[]", "raised NameError"]


def test_splits_share_neither_repository_nor_function(shapes_set):
    _, tasks = shapes_set
    copies = [
        msgspec.structs.replace(
            one,
            task=msgspec.structs.replace(one.task, task_id=f"copy.{number}.{one.task.task_id}"),
            origin=msgspec.structs.replace(one.origin, repository=f"other{number}"),
        )
        for number, one in enumerate(tasks)
    ]
    every = [*tasks, *copies, *ladder(60).candidates()]
    splits = split_tasks(every, SplitBy.REPOSITORY, 0.3)
    assert len({splits[one.task.task_id] for one in [*tasks, *copies]}) == 1
    assert {Split.TRAIN, Split.HELDOUT} == set(splits.values())
    torn = {**splits, copies[0].task.task_id: Split.TRAIN, tasks[0].task.task_id: Split.HELDOUT}
    with pytest.raises(SplitLeakError, match="both splits"):
        check_no_leak(every, torn, SplitBy.FUNCTION)


def test_a_rarer_bug_with_less_said_is_harder():
    origin = next(ladder(1).candidates()).origin
    easy = msgspec.structs.replace(origin, num_cases=10, num_cases_failed=10, hint="function")
    hard = msgspec.structs.replace(
        origin, num_cases=10, num_cases_failed=1, hint="symptom", num_lines=50, num_files=30
    )
    assert 0 <= difficulty(easy) < difficulty(hard) <= 1
    assert (difficulty_label(easy), difficulty_label(hard)) == ("easy", "hard")


def test_a_module_comes_with_what_it_imports(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from pkg.a import f\n")
    (package / "a.py").write_text("from . import b\nimport os\ndef f(): return b.g()\n")
    (package / "b.py").write_text("def g(): return 1\n")
    (package / "c.py").write_text("raise SystemExit\n")
    module = next(one for one in folder_modules(tmp_path) if one.name == "pkg.a")
    assert sorted(needed_files(module)) == ["pkg/__init__.py", "pkg/a.py", "pkg/b.py"]


@pytest.mark.parametrize(
    ("lines", "files"), [(20, ["a.py", "b.py", "large.py"]), (40_000, ["a.py", "b.py"])]
)
def test_a_large_module_comes_without_what_only_a_checker_or_a_call_imports(tmp_path, lines, files):
    (tmp_path / "a.py").write_text(
        "from typing import TYPE_CHECKING\nimport b\nif TYPE_CHECKING:\n    import huge\n"
        "def f():\n    import large\n    return large\n"
    )
    (tmp_path / "b.py").write_text("def g(): return 1\n")
    (tmp_path / "large.py").write_text("x = 1\n" * lines)
    (tmp_path / "huge.py").write_text("x = 1\n" * 40_000)
    module = next(one for one in folder_modules(tmp_path) if one.name == "a")
    assert sorted(needed_files(module)) == files


def test_unknown_sources_say_what_was_expected(tmp_path):
    with pytest.raises(NotFoundError, match="not installed"):
        open_source("no_such_package", InjectConfig())
    with pytest.raises(NotFoundError, match="import name"):
        package_modules("../etc")
    with pytest.raises(NotFoundError, match="expected a folder"):
        open_source(str(tmp_path / "absent"), InjectConfig())
    with pytest.raises(NotFoundError, match="git repository"):
        CommitSource(tmp_path)


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", folder, *identity, *arguments], check=True, capture_output=True)


async def test_a_fix_with_its_tests_becomes_a_task(tmp_path):
    folder = tmp_path / "repo"
    (folder / "tests").mkdir(parents=True)
    git(tmp_path, "init", "-q", str(folder))
    (folder / "m.py").write_text("def half(n):\n    return n / 2\n")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Start")
    (folder / "m.py").write_text("def half(n):\n    return n // 2\n")
    (folder / "tests" / "test_m.py").write_text(
        "import unittest\nfrom m import half\n\n\nclass HalfTest(unittest.TestCase):\n"
        "    def test_odd(self):\n        self.assertEqual(half(3), 1)\n\n"
        "    def test_even(self):\n        self.assertEqual(half(4), 2)\n\n\n"
        "def test_plain():\n    assert half(5) == 2\n"
    )
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "Round halves down")
    lab = HostLab(tmp_path / "lab")
    (tmp_path / "lab").mkdir()
    (plan,) = CommitSource(folder).plans()
    (candidate,) = await plan.draft(lab)
    assert candidate.task.instruction.startswith("Round halves down")
    assert list(candidate.task.files) == ["m.py"]
    assert (candidate.origin.num_cases_failed, candidate.origin.num_cases) == (2, 3)
    await asyncio.wait_for(check_candidate(candidate, lab.grade), 30)
