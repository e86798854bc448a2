import os
import random
import tomllib

import msgspec
import pytest

from penstock.envs.factory.factory import MakingCounts, statistics
from penstock.envs.tasks.dockerfile import start_files
from penstock.envs.tasks.harbor.folder import MalformedTaskError, plain_tree
from penstock.envs.tasks.harbor.read import ReadOptions, read_harbor
from penstock.envs.tasks.harbor.write import (
    UnwritableTaskError,
    folder_name,
    harbor_files,
    write_harbor,
)
from penstock.envs.tasks.readers.opening import read_tasks
from penstock.envs.tasks.storage import task_objects
from penstock.examples.quickstart.ladder.generate import LadderSource, Selection
from penstock.infra.tasks.actions import tasks_page, write_set
from penstock.messages.task import FileKind, MachineNeeds, Split, TaskStep


def ladder(num):
    rng = random.Random("train/0")
    return list(LadderSource(Split.TRAIN, num, Selection(), rng, "train").candidates())


def written(tmp_path):
    return write_harbor(ladder(1)[0], Split.TRAIN, tmp_path)


def test_a_task_comes_back_as_it_was_written(tmp_path):
    for candidate in ladder(8):
        assert read_harbor(write_harbor(candidate, Split.TRAIN, tmp_path)) == candidate


def test_a_folder_has_what_harbor_asks_for():
    (candidate,) = ladder(1)
    files = harbor_files(candidate, Split.HELDOUT)
    settings = tomllib.loads(files["task.toml"].decode())
    assert settings["version"] == "1.0"
    assert {"metadata", "verifier", "agent", "environment"} <= settings.keys()
    assert settings["metadata"]["difficulty"] in {"easy", "medium", "hard"}
    assert settings["metadata"]["penstock"]["split"] == "heldout"
    assert settings["environment"]["allow_internet"] is False
    assert {"instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"} <= (
        files.keys()
    )
    assert b"/logs/verifier/reward.txt" in files["tests/test.sh"]
    visible = [data for path, data in files.items() if path.startswith("environment/")]
    hidden = candidate.hidden.contents.values()
    assert not any(data in shown for data in hidden for shown in visible)


def test_an_allow_list_travels_with_its_task_and_is_checked(tmp_path):
    (candidate,) = ladder(1)
    task = msgspec.structs.replace(candidate.task, egress=["pypi.test:443", "*.files.test:80"])
    allowed = msgspec.structs.replace(candidate, task=task)
    folder = write_harbor(allowed, Split.TRAIN, tmp_path)
    assert read_harbor(folder) == allowed
    settings = folder / "task.toml"
    settings.write_text(settings.read_text().replace("pypi.test:443", "127.0.0.1:443"))
    with pytest.raises(MalformedTaskError, match=r"task\.toml.*egress.*127\.0\.0\.1"):
        read_harbor(folder)


def test_an_address_in_an_allow_list_is_the_operators_to_allow(tmp_path):
    (candidate,) = ladder(1)
    task = msgspec.structs.replace(candidate.task, egress=["x.test:80@169.254.169.254"])
    written = msgspec.structs.replace(candidate, task=task)
    folder = write_harbor(written, Split.TRAIN, tmp_path)
    with pytest.raises(MalformedTaskError, match=r"task\.toml: metadata\.penstock\.egress: .*169"):
        read_harbor(folder)
    assert read_harbor(folder, ReadOptions(egress_addresses=True)) == written
    assert read_tasks(tmp_path, ReadOptions(egress_addresses=True)) == [written]


def test_an_image_travels_with_its_task_by_content(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    (candidate,) = ladder(1)
    digest = "ab" * 32
    for number, image in enumerate((digest, "python:3.11-slim")):
        task = msgspec.structs.replace(candidate.task, image=image)
        named = msgspec.structs.replace(candidate, task=task)
        assert read_harbor(write_harbor(named, Split.TRAIN, tmp_path / str(number))) == named
    settings = written(tmp_path) / "task.toml"
    plain = settings.read_text()
    for reference in (f"sha256:{digest}", f"org/mytask:2@sha256:{digest}"):
        docker_image = f'[environment]\ndocker_image = "{reference}"\n'
        settings.write_text(plain.replace("[environment]\n", docker_image))
        assert read_harbor(settings.parent).task.image == digest
    settings.write_text(plain.replace("[environment]\n", "[environment]\ndocker_image = 3\n"))
    with pytest.raises(MalformedTaskError, match=r"environment\.docker_image"):
        read_harbor(settings.parent)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", [TaskStep(instruction="Then this")]),
        ("has_setup", True),
        ("pages", {"a.txt": "a"}),
        ("call_sleep_s", (0.5, 1.0)),
    ],
)
def test_a_task_that_a_folder_would_cut_is_refused_by_its_field(tmp_path, field, value):
    (candidate,) = ladder(1)
    task = msgspec.structs.replace(candidate.task, **{field: value})
    whole = msgspec.structs.replace(candidate, task=task)
    with pytest.raises(UnwritableTaskError, match=f"{task.task_id}: {field}: expected none"):
        write_harbor(whole, Split.TRAIN, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_hard_texts_survive_toml(tmp_path):
    (candidate,) = ladder(1)
    origin = msgspec.structs.replace(candidate.origin, repository='a"\\b\n\x7f\té')
    hard = msgspec.structs.replace(candidate, origin=origin)
    assert read_harbor(write_harbor(hard, Split.TRAIN, tmp_path)).origin == origin


@pytest.mark.parametrize(
    ("path", "text", "words"),
    [
        ("task.toml", "version = ", "task.toml"),
        ("task.toml", 'version = "2.0"\n', "expected '1.x', got '2.0'"),
        ("task.toml", 'version = "1.0"\nverifier = 3\n', "verifier: expected a table"),
        ("task.toml", 'version = "1.0"\n[verifier]\ntimeout_sec = -1\n', "timeout_sec"),
        ("task.toml", 'version = "1.0"\n[metadata.penstock]\nsplit = "x"\n', "penstock.split"),
        ("task.toml", 'version = "1.0"\n[metadata.penstock]\norigin = {kind = 1}\n', "origin"),
        (
            "task.toml",
            'version = "1.0"\n[metadata]\npenstock = "x"\n',
            "penstock: expected a table",
        ),
        ("instruction.md", "  \n", "expected an instruction"),
        ("tests/penstock.json", "{}", "penstock.json"),
        ("tests/penstock.json", '{"argv": [], "expected": []}', "at least one entry"),
        ("tests/penstock.json", '{"argv": ["a"], "expected": ["b"], "more": 1}', "more"),
    ],
)
def test_a_malformed_part_is_named(tmp_path, path, text, words):
    folder = written(tmp_path)
    (folder / path).write_text(text)
    with pytest.raises(MalformedTaskError, match=words):
        read_harbor(folder)


@pytest.mark.parametrize("variable", ['"-i" = "x"', '"A=B" = "x"', '"" = "x"', 'A = "x\\u0000"'])
def test_a_verifiers_variables_are_variables(tmp_path, variable):
    folder = written(tmp_path)
    (folder / "tests" / "penstock.json").unlink()
    (folder / "task.toml").write_text(f'version = "1.0"\n[verifier.env]\n{variable}\n')
    with pytest.raises(MalformedTaskError, match=r"task\.toml: verifier\.env"):
        read_harbor(folder)


def test_no_two_tasks_of_a_set_have_one_id(tmp_path):
    written(tmp_path / "a").rename(tmp_path / "first")
    written(tmp_path / "b").rename(tmp_path / "second")
    with pytest.raises(MalformedTaskError, match=r"second: .*task_id.* another task's"):
        read_tasks(tmp_path)


def test_missing_parts_are_named(tmp_path):
    folder = written(tmp_path)
    (folder / "instruction.md").unlink()
    with pytest.raises(MalformedTaskError, match=r"instruction\.md: expected a file"):
        read_harbor(folder)
    with pytest.raises(MalformedTaskError, match="expected task folders"):
        read_tasks(tmp_path / "absent")


def test_no_link_leads_out_of_a_task(tmp_path):
    (tmp_path / "secret").write_text("key")
    for number, place in enumerate(("environment/files/x", "tests/files/x", "solution/files/x")):
        folder = write_harbor(ladder(number + 1)[number], Split.TRAIN, tmp_path / "tasks")
        (folder / place).symlink_to(tmp_path / "secret")
        candidate = read_harbor(folder)
        hidden = candidate.hidden
        (link,) = [*candidate.task.states, *hidden.states, *hidden.gold_states]
        assert link.kind is FileKind.LINK and link.target == os.fsencode(tmp_path / "secret")
        assert b"key" not in msgspec.msgpack.encode(candidate)
        (folder / place).unlink()
    (folder / "solution/files").rename(tmp_path / "elsewhere")
    (folder / "solution/files").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MalformedTaskError, match="a link, or out of"):
        read_harbor(folder)


BINARY = b"\x89PNG\xff\xfe\0"


def test_binary_files_come_in_and_go_out_as_they_are(tmp_path):
    folder = written(tmp_path)
    for place in ("environment", "tests", "solution"):
        (folder / place / "files/a.bin").write_bytes(BINARY)
    candidate = read_harbor(folder)
    assert candidate.task.binaries == {"a.bin": BINARY} == candidate.hidden.gold_binaries
    assert candidate.task.contents == candidate.task.binaries | {
        path: text.encode() for path, text in candidate.task.files.items()
    }
    assert read_harbor(write_harbor(candidate, Split.TRAIN, tmp_path / "again")) == candidate
    objects = task_objects([candidate], Split.TRAIN)
    assert BINARY in objects["tasks/train"] and BINARY in objects["hidden_tests/train"]


def test_a_foreign_tasks_binary_files_come_in_and_go_out_as_they_are(tmp_path):
    folder = tmp_path / "t"
    for place in ("environment/data", "tests", "solution"):
        (folder / place).mkdir(parents=True)
        (folder / place / "a.bin").write_bytes(BINARY)
    (folder / "task.toml").write_text('version = "1.0"\n')
    (folder / "instruction.md").write_text("Do it\n")
    (folder / "environment/Dockerfile").write_text("FROM debian\nCOPY data/ /app/\n")
    (folder / "tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    candidate = read_harbor(folder)
    assert candidate.task.binaries == {"a.bin": BINARY}
    assert candidate.hidden.binaries == {"/tests/a.bin": BINARY}
    again = read_harbor(write_harbor(candidate, Split.TRAIN, tmp_path / "again"))
    assert again.task.contents == candidate.task.contents
    assert again.hidden.contents == candidate.hidden.contents
    assert again.hidden.gold_contents == candidate.hidden.gold_contents


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ("instruction.md", "UTF-8"),
        ("task.toml", "UTF-8"),
        ("tests/penstock.json", "UTF-8|JSON"),
        ("tests/files/check.py", "hidden test check.py"),
    ],
)
def test_what_is_read_as_text_must_be_text(tmp_path, place, text):
    folder = written(tmp_path)
    (folder / place).write_bytes(BINARY)
    with pytest.raises(MalformedTaskError, match=text):
        read_harbor(folder)


def test_oversized_files_are_refused(tmp_path):
    folder = written(tmp_path)
    (folder / "environment/files/a.bin").write_bytes(bytes((8 << 20) + 1))
    with pytest.raises(MalformedTaskError, match="at most"):
        read_harbor(folder)


def test_a_foreign_task_is_judged_by_its_reward_file(tmp_path):
    (tmp_path / "t" / "tests").mkdir(parents=True)
    (tmp_path / "t" / "task.toml").write_text('schema_version = "1.1"\n[task]\nname = "o/t"\n')
    (tmp_path / "t" / "instruction.md").write_text("Do it\n")
    (tmp_path / "t" / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    candidate = read_harbor(tmp_path / "t")
    assert candidate.task.instruction == "Do it"
    assert candidate.hidden.expected == ["1"]
    assert list(candidate.hidden.files) == ["/tests/test.sh"]


@pytest.mark.parametrize(
    ("dockerfile", "placed"),
    [
        ("", {"a.py", "src/b.py", "src/c/d.py"}),
        ("WORKDIR /app\nCOPY . .\n", {"a.py", "src/b.py", "src/c/d.py"}),
        ("WORKDIR /app\nCOPY a.py src/b.py x/\n", {"x/a.py", "x/b.py"}),
        ("WORKDIR /app\nCOPY a.py new.py\ncopy src ./\n", {"new.py", "b.py", "c/d.py"}),
        ("COPY src /app/lib\nCOPY a.py /etc/\n", {"lib/b.py", "lib/c/d.py"}),
        ("WORKDIR /srv\nWORKDIR x\nADD ./src/ \\\n  /srv/x/y\n", {"y/b.py", "y/c/d.py"}),
        ("WORKDIR /app\nCOPY --from=build a.py .\nCOPY absent .\nCOPY 'a.py\n", set()),
        ("WORKDIR /app\nCOPY a.py ../../../etc/passwd\n", set()),
        ("WORKDIR /app\nCOPY a.py /app\nCOPY src/b.py /work\n", {"a.py", "b.py"}),
        ("WORKDIR /app\nCOPY --chown=1:1 --chmod=755 a.py .\n", {"a.py"}),
        ("WORKDIR /app/x\nCOPY src .\n", {"x/b.py", "x/c/d.py"}),
    ],
)
def test_a_foreign_dockerfile_says_what_an_agent_starts_with(dockerfile, placed):
    context = plain_tree({"a.py": b"a", "src/b.py": b"b", "src/c/d.py": b"d"})
    assert set(start_files(dockerfile, context)) == placed


@pytest.mark.parametrize("name", ["../../etc/x", "a/b", "..", "", "a:b c"])
def test_folder_names_stay_below_their_root(tmp_path, name):
    assert (tmp_path / folder_name(name)).resolve().parent == tmp_path.resolve()


def test_a_set_has_both_splits_statistics_and_a_page(tmp_path):
    tasks = ladder(6)
    splits = {
        one.task.task_id: Split.HELDOUT if number % 3 == 0 else Split.TRAIN
        for number, one in enumerate(tasks)
    }
    counts = MakingCounts(num_plans=10, rejected={"gate_flaky": 4})
    write_set(tmp_path, tasks, splits, counts)
    figures = statistics(tasks, splits, counts)
    assert figures["by_split"] == {"train": 4, "heldout": 2}
    assert figures["tasks_per_plan"] == 0.6 and figures["rejected"] == {"gate_flaky": 4}
    assert {one.task.task_id: one.task.split for one in read_tasks(tmp_path)} == splits


def test_no_text_of_a_task_is_markup_of_the_page():
    (candidate,) = ladder(1)
    evil = msgspec.structs.replace(candidate.task, instruction="</script><img src=x>")
    page = tasks_page(
        [msgspec.structs.replace(candidate, task=evil)], {evil.task_id: Split.TRAIN}, MakingCounts()
    )
    assert "<img" not in page and page.count("</script>") == 1


def test_a_strangers_machine_is_read_and_demands_isolation(tmp_path):
    folder = tmp_path / "t"
    (folder / "tests").mkdir(parents=True)
    settings = folder / "task.toml"
    settings.write_text('schema_version = "1.1"\n[task]\nname = "o/t"\n')
    (folder / "instruction.md").write_text("Do it\n")
    (folder / "tests" / "test.sh").write_text("echo 1 > /logs/verifier/reward.txt\n")
    words = "\n[environment]\ncpus = 2\nmemory_mb = 2048\nstorage_mb = 10240\n"
    settings.write_text(settings.read_text() + words)
    task = read_harbor(folder, ReadOptions(isolation_min="hardware_vm")).task
    assert task.machine == MachineNeeds(memory_mib=2048, isolation_min="hardware_vm")
    settings.write_text(settings.read_text().replace("2048", "-5"))
    with pytest.raises(MalformedTaskError, match=r"environment: machine.memory_mib: .* -5"):
        read_harbor(folder)
