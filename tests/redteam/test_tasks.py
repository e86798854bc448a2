"""Tasks of strangers: folders, limits and stored objects that are refused by file and field."""

import itertools
import os
import random
import socket

import msgspec
import pytest

from penstock.envs.tasks.harbor.folder import FILES_MAX, MalformedTaskError
from penstock.envs.tasks.harbor.read import read_harbor
from penstock.envs.tasks.harbor.write import write_harbor
from penstock.envs.tasks.readers.opening import read_tasks
from penstock.envs.tasks.source import difficulty
from penstock.envs.tasks.storage import TaskBook, load_hidden_tests, load_tasks
from penstock.examples.quickstart.ladder.generate import LadderSource, Selection
from penstock.infra.config.prepare import PrepareConfig
from penstock.infra.run.task_sources import drawn_tasks
from penstock.messages.errors import CodecError
from penstock.messages.task import HiddenTests, Limits, Purpose, Split

FOREIGN = {
    "task.toml": 'version = "1.0"\n[verifier]\ntimeout_sec = 60.0\n[agent]\ntimeout_sec = 60.0\n',
    "instruction.md": "Do it.\n",
    "environment/Dockerfile": "FROM debian:12\nWORKDIR /app\nCOPY a.txt .\n",
    "environment/a.txt": "a\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
}


@pytest.fixture
def own(tmp_path):
    (candidate,) = LadderSource(Split.TRAIN, 1, Selection(), random.Random(0), "train").candidates()
    return write_harbor(candidate, Split.TRAIN, tmp_path)


@pytest.fixture
def foreign(tmp_path):
    folder = tmp_path / "foreign"
    for path, text in FOREIGN.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def replaced(folder, path, before, after):
    text = (folder / path).read_text()
    assert before in text
    (folder / path).write_text(text.replace(before, after, 1))


def refused(folder, words):
    with pytest.raises(MalformedTaskError, match=words):
        read_harbor(folder)


LIES = ("inf", "-inf", "nan", "-1", "0", "9223372036854775808", "1e308", '"inf"', "true", "[1]")


ZERO_IS_FINE = ("window_tokens_max", "0")


@pytest.mark.parametrize(
    ("name", "value"),
    [pair for pair in itertools.product(Limits.__struct_fields__, LIES) if pair != ZERO_IS_FINE],
)
def test_a_limit_is_positive_and_has_a_maximum(own, name, value):
    line = next(
        line for line in (own / "task.toml").read_text().splitlines() if line.startswith(name)
    )
    if value == "true":
        value = "99999999999"
    replaced(own, "task.toml", line, f"{name} = {value}")
    refused(own, rf"task\.toml: metadata\.penstock\.limits: .*{name}")


@pytest.mark.parametrize("value", LIES)
@pytest.mark.parametrize("table", ["verifier", "agent"])
def test_a_foreign_timeout_is_positive_and_has_a_maximum(foreign, table, value):
    replaced(
        foreign, "task.toml", f"[{table}]\ntimeout_sec = 60.0", f"[{table}]\ntimeout_sec = {value}"
    )
    refused(foreign, rf"task\.toml: {table}\.timeout_sec")


def test_what_travels_is_bounded_too():
    """A limit that got past the reader, in a message or in the store."""
    for name, value in (("wall_s_max", float("inf")), ("num_turns_max", 2**63 - 1)):
        data = msgspec.msgpack.encode({name: value})
        with pytest.raises(msgspec.ValidationError, match=name):
            msgspec.msgpack.decode(data, type=Limits)
    data = msgspec.msgpack.encode(
        {"task_id": "t", "files": {}, "argv": [], "timeout_s": float("nan")}
    )
    with pytest.raises(msgspec.ValidationError, match="timeout_s"):
        msgspec.msgpack.decode(data, type=HiddenTests)


SETTINGS = {
    "arrays in arrays": "x = " + "[" * 5_000 + "]" * 5_000,
    "tables in tables": "x = " + "{a = " * 3_000 + "1" + "}" * 3_000,
    "a number of many digits": "x = " + "9" * 10_000,
    "no TOML": "x = = 1",
    "a long file": "# " + "x" * 300_000,
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_break_a_parser_are_refused(foreign, name):
    (foreign / "task.toml").write_text(f"{SETTINGS[name]}\n{FOREIGN['task.toml']}")
    refused(foreign, r"task\.toml")


def test_origins_cannot_break_the_statistics(own):
    replaced(own, "task.toml", "num_files = ", "num_files = -")
    refused(own, r"metadata\.penstock\.origin: .*num_files")


@pytest.mark.parametrize("task_id", ["", "x" * 5_000, "a\\nb", "a\\u0000b", "\\u001b[2J"])
def test_a_task_s_name_is_short_and_printable(own, task_id):
    line = next(
        one for one in (own / "task.toml").read_text().splitlines() if one.startswith("task_id")
    )
    replaced(own, "task.toml", line, f'task_id = "{task_id}"')
    refused(own, r"metadata\.penstock\.task_id")


@pytest.mark.parametrize(
    "module", ["../../../etc/passwd", "*", "os/../../x", "a b", "", "x" * 100, "a..b"]
)
def test_a_sealed_module_is_a_module_s_name(own, module):
    tests = own / "tests" / "penstock.json"
    content = msgspec.json.decode(tests.read_bytes())
    tests.write_bytes(msgspec.json.encode(content | {"sealed_modules": [module]}))
    refused(own, r"penstock\.json: .*sealed_modules")


def test_nested_json_is_refused(own):
    (own / "tests" / "penstock.json").write_text('{"argv": ' + "[" * 100_000)
    refused(own, r"penstock\.json")


@pytest.mark.parametrize(
    "text", ["x = " + "-" * 100_000 + "1", "# coding: rot13\nvzcbeg bf\n", "def f(:\n"]
)
def test_a_hidden_test_that_does_not_parse_is_refused_when_it_is_read(own, text):
    (own / "tests" / "files" / "_hidden.py").write_text(text)
    refused(own, r"hidden test .*\.py (does not parse|nests too deep|expected UTF-8)")


def _deep(folder):
    path = folder / "environment"
    for _ in range(60):
        path = path / "d"
    path.mkdir(parents=True)
    (path / "x").write_text("x")


def _many(folder):
    for number in range(FILES_MAX + 2):
        (folder / "tests" / f"{number}").touch()


def _many_folders(folder):
    for number in range(FILES_MAX + 2):
        (folder / "environment" / f"{number}").mkdir()


def _large(folder):
    with (folder / "environment" / "big").open("wb") as file:
        file.truncate(1 << 40)


def _socket(folder):
    socket.socket(socket.AF_UNIX).bind(str(folder / "environment" / "s")[-100:])


def _copies(folder):
    (folder / "environment" / "a.txt").write_text("a" * (1 << 20))
    lines = "".join(f"COPY a.txt /app/{number}/\n" for number in range(500))
    (folder / "environment" / "Dockerfile").write_text(f"WORKDIR /app\n{lines}")


FOLDERS = {
    "a link for the settings": lambda f: (
        (f / "task.toml").unlink(), (f / "task.toml").symlink_to("/etc/passwd")
    ),
    "a link for the tests": lambda f: (
        (f / "tests").rename(f / "t"), (f / "tests").symlink_to("t")
    ),
    "a pipe": lambda f: os.mkfifo(f / "environment" / "p"),
    "a pipe for the instruction": lambda f: (
        (f / "instruction.md").unlink(), os.mkfifo(f / "instruction.md")
    ),
    "an instruction that is no UTF-8": lambda f: (f / "instruction.md").write_bytes(b"\xff"),
    "a name with an escape": lambda f: (f / "environment" / "\x1b[2J").write_text("x"),
    "a name with a line break": lambda f: (f / "tests" / "a\nb").write_text("x"),
    "folders too deep": _deep,
    "many files": _many,
    "many folders": _many_folders,
    "a large file": _large,
    "a folder for a file": lambda f: (
        (f / "instruction.md").unlink(), (f / "instruction.md").mkdir()
    ),
    "copies without end": _copies,
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDERS)
def test_a_hostile_folder_is_refused_by_its_file(foreign, name):
    read_harbor(foreign)
    FOLDERS[name](foreign)
    refused(foreign, str(foreign.name))


def test_a_set_s_own_difficulty_is_finite(own):
    for candidate in read_tasks(own.parent):
        assert 0.0 <= difficulty(candidate.origin) <= 1.0


def test_who_shares_its_user_with_the_code_says_so(foreign):
    assert read_harbor(foreign).hidden.unseparated
    with (foreign / "task.toml").open("a") as file:
        file.write("[metadata.penstock]\nseparated = true\n")
    candidate = read_harbor(foreign)
    assert not candidate.hidden.unseparated
    again = write_harbor(candidate, Split.TRAIN, foreign.parent / "again")
    assert read_harbor(again) == msgspec.structs.replace(candidate)
    replaced(foreign, "task.toml", "separated = true", 'separated = "perhaps"')
    refused(foreign, r"metadata\.penstock\.separated")


def test_a_task_whose_reward_can_be_forged_evaluates_nothing(foreign):
    for number, split in enumerate(("train", "heldout")):
        settings = FOREIGN["task.toml"] + f'[metadata.penstock]\nsplit = "{split}"\n'
        (foreign / "task.toml").write_text(settings)
        candidate = read_harbor(foreign)
        task = msgspec.structs.replace(candidate.task, task_id=f"t{number}")
        named = msgspec.structs.replace(candidate, task=task)
        write_harbor(named, Split(split), foreign.parent / "set")
    config = PrepareConfig(tasks=str(foreign.parent / "set"))
    with pytest.raises(MalformedTaskError, match=r"heldout.*separated.*evaluates_unseparated"):
        drawn_tasks(config, 0)
    allowed = msgspec.structs.replace(config, evaluates_unseparated=True)
    assert [len(list(tasks)) for tasks in drawn_tasks(allowed, 0).values()] == [1, 1]


class OneObject:
    """A store whose every object has been replaced."""

    def __init__(self, data):
        self.data = data

    async def get(self, key):
        return self.data


STORED = {
    "no msgpack": b"\xc1",
    "another type": msgspec.msgpack.encode({"a": 1}),
    "nested too deep": b"\x91" * 100_000,
    "an announced length": b"\xdd\xff\xff\xff\xff",
    "a text that is no UTF-8": b"\x91\x81\xa7task_id\xa1\xff",
    "an endless limit": msgspec.msgpack.encode(
        [{"task_id": "t", "category": "c", "split": "train", "instruction": "i", "files": {},
          "limits": {"tool_s_max": float("inf")}}]
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORED)
async def test_stored_tasks_that_are_none_are_one_error(name):
    store = OneObject(STORED[name])
    with pytest.raises(CodecError, match="tasks/train"):
        await load_tasks(store, Split.TRAIN)
    with pytest.raises(CodecError, match="hidden_tests/train"):
        await load_hidden_tests(store, Split.TRAIN)
    with pytest.raises(CodecError):
        await TaskBook().find(store, Purpose.TRAIN, "t")


def test_links_and_odd_names_are_carried_and_nothing_follows_them(foreign):
    folder, place = foreign, foreign / "environment"
    replaced(foreign, "environment/Dockerfile", "COPY a.txt .", "COPY . .")
    links = {"passwd": "/etc/passwd", "etc": "/etc", "circle": "circle", "up": "../../../../etc"}
    for name, target in links.items():
        (place / name).symlink_to(target)
    (place / os.fsdecode(b"\xff")).write_text("x")
    candidate = read_harbor(folder)
    told = {one.path.decode("latin-1"): one.target.decode() for one in candidate.task.states}
    assert {name: told[name] for name in links} == links and "\xff" in told
    assert b"root:" not in msgspec.msgpack.encode(candidate)
