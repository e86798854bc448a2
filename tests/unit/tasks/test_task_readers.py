"""Tasks that people already have: collections with anything in them, and each format's reader."""

import json
import os
import subprocess

import msgspec
import pytest

from penstock.envs.microvm.images import layers
from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import ReadOptions, read_harbor
from penstock.envs.tasks.readers.opening import read_tasks
from penstock.infra.cli import main
from penstock.infra.tasks.images import missing_images, visible
from penstock.infra.tasks.survey import survey
from penstock.messages.task import FileKind

HARBOR = {
    "task.toml": 'version = "1.0"\n[metadata]\nnote = 1\n[environment]\nallow_internet = true\n'
    "storage_mb = 10240\nworkdir = '/workspace'\n",
    "instruction.md": "Make it work.\n",
    "environment/Dockerfile": "FROM ubuntu:24.04\nWORKDIR /workspace\nCOPY run.sh .\n",
    "environment/run.sh": "echo run\n",
    "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
    "solution/solve.sh": "touch /workspace/done\n",
}
BENCH = {
    "task.yaml": "instruction: |-\n  Say hello.\nauthor_email: a@b.c\ndifficulty: easy\n"
    "category: say\nparser_name: pytest\nmax_agent_timeout_sec: 120\n",
    "Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY data ./data\n",
    "docker-compose.yaml": "services:\n  client:\n    build: .\n",
    "data/a.txt": "a\n",
    "run-tests.sh": "#!/bin/bash\npytest $TEST_DIR/test_outputs.py\n",
    "solution.sh": "echo hello > /app/hello\n",
    "tests/test_outputs.py": "def test_a(): pass\n",
}
SWE = {
    "instance_id": "org__repo-1",
    "repo": "org/repo",
    "base_commit": "0" * 40,
    "problem_statement": "It is wrong.",
    "patch": "--- a/x\n+++ b/x\n",
    "test_patch": "--- a/t\n+++ b/t\n",
    "FAIL_TO_PASS": '["tests/test_x.py::test_a"]',
    "PASS_TO_PASS": ["tests/test_x.py::test_b[1]"],
}
OFFLINE = ReadOptions(is_offline=True)


def write(folder, files):
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def image(monkeypatch):
    """Make every image one that is here: its layer is another's test."""
    monkeypatch.setattr(layers, "load_layer", lambda name, cache=None: (None, layers.ImageLayer(
        name=name, digest="a" * 64, inputs="", num_bytes=1
    )))  # fmt: skip


@pytest.fixture
def collection(tmp_path):
    root = tmp_path / "set"
    write(root / "plain", HARBOR)
    (root / "plain/environment/run.sh").chmod(0o755)
    write(root / "deep/er/bench", BENCH)
    write(root / "image", HARBOR | {"environment/Dockerfile": "FROM private.test/x\nRUN make\n"})
    write(root / "torn", HARBOR | {"task.toml": "version = "})
    write(root / "asks", HARBOR | {"task.toml": '[environment]\ngpus = 1\nskills_dir = "/s"\n'})
    write(root / "compose", BENCH | {"docker-compose.yaml": "services: {a: {}, b: {}}\n"})
    write(root / "bytes", HARBOR)
    (root / "bytes/instruction.md").write_bytes(b"\xff")
    (root / "instances.jsonl").write_text(f"{json.dumps(SWE)}\nno json\n[1]\n")
    (root / "loop").symlink_to(root)
    return root


def test_a_survey_says_all_of_every_task_and_none_stops_it(collection):
    rows, kinds = survey(collection, ReadOptions())
    status = {row.name: row.status for row in rows}
    assert status == {
        "plain": "read", "deep/er/bench": "read", "image": "needs an image", "torn": "refused",
        "asks": "refused", "compose": "refused", "bytes": "refused",
        "org__repo-1": "needs an image", "2": "refused", "3": "refused",
    }  # fmt: skip
    asks = next(row for row in rows if row.name == "asks")
    assert len(asks.reasons) == 2 and sum(kinds.values()) == 9
    plain = next(row for row in rows if row.name == "plain")
    assert [one.partition(":")[0] for one in plain.adapted] == [
        "environment.storage_mb", "network"
    ]  # fmt: skip


def test_the_import_keeps_what_can_be_read(collection, tmp_path, capsys):
    assert main(["tasks", "import", str(collection), "-o", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "asks: " in said and "environment.gpus" in said and "2  read" in said
    again = {one.task.task_id: one for one in read_tasks(tmp_path / "out")}
    assert set(again) == {"plain", "bench"}
    assert [one.mode for one in again["plain"].task.states] == [0o755]
    report = json.loads((tmp_path / "out/import.json").read_text())
    assert report["num_tasks"] == 10 and len(report["tasks"]) == 10


def test_offline_refuses_what_asks_for_a_network(collection, capsys):
    rows, _ = survey(collection, OFFLINE)
    plain = next(row for row in rows if row.name == "plain")
    assert plain.status == "refused" and "offline" in plain.reasons[0]


def test_a_terminal_bench_task_is_graded_by_its_run_tests(tmp_path):
    (candidate,) = read_tasks(write(tmp_path / "bench", BENCH))
    task, hidden = candidate.task, candidate.hidden
    assert (task.instruction, task.category, task.limits.wall_s_max) == ("Say hello.", "say", 120)
    assert task.files == {"data/a.txt": "a\n"}
    assert hidden.files["/tests/run-tests.sh"] == BENCH["run-tests.sh"]
    assert hidden.files["/tests/test_outputs.py"] == BENCH["tests/test_outputs.py"]
    assert "bash /tests/run-tests.sh" in hidden.files["/tests/test.sh"]
    assert hidden.gold_files == {"/solution/solve.sh": BENCH["solution.sh"]}
    assert hidden.argv[:2] == ["env", "TEST_DIR=/tests"]
    assert "author_email: kept, without effect" in candidate.adapted


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("task.yaml", "instruction: [", "task.yaml"),
        ("task.yaml", "a: 1\n", "instruction"),
        ("task.yaml", "instruction: x\nmax_agent_timeout_sec: -1\n", "max_agent_timeout_sec"),
        ("task.yaml", "instruction: x\nmax_test_timeout_sec: .inf\n", "max_test_timeout_sec"),
        ("docker-compose.yaml", "services: 3\n", "services"),
        ("docker-compose.yaml", "services:\n  a: {}\n  b: {}\n", "expected one service"),
    ],
)
def test_a_malformed_terminal_bench_task_is_refused_by_its_field(tmp_path, name, text, words):
    with pytest.raises(MalformedTaskError, match=words):
        read_tasks(write(tmp_path / "bench", BENCH | {name: text}))


def test_an_instance_is_a_task_in_its_image(tmp_path, image):
    path = tmp_path / "swe.jsonl"
    smith = SWE | {
        "instance_id": "smith-1",
        "image_name": "jyangballin/swesmith.x",
        "test_cmd": "t",
    }
    path.write_text(f"{json.dumps(SWE)}\n\n{json.dumps(smith)}\n")
    first, second = read_tasks(path)
    assert first.task.image == "a" * 64 and first.task.instruction == "It is wrong."
    wanted = json.loads(first.hidden.files["/tests/wanted.json"])
    assert wanted == ["tests/test_x.py::test_a", "tests/test_x.py::test_b[1]"]
    assert '"tests/test_x.py"' in first.hidden.files["/tests/test.sh"]
    assert first.hidden.files["/tests/test.patch"] == SWE["test_patch"]
    assert "apply  /solution" in first.hidden.gold_files["/solution/solve.sh"]
    assert "apply -R /solution" in second.hidden.gold_files["/solution/solve.sh"]


def test_instances_of_parquet_are_the_same(tmp_path, image):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist([SWE])
    parquet.write_table(table, tmp_path / "swe.parquet")
    (tmp_path / "swe.jsonl").write_text(json.dumps(SWE))
    assert read_tasks(tmp_path / "swe.parquet") == read_tasks(tmp_path / "swe.jsonl")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("instance_id", "../x"), ("instance_id", 3), ("problem_statement", " "), ("patch", None),
        ("FAIL_TO_PASS", "[1"), ("FAIL_TO_PASS", [1]), ("PASS_TO_PASS", {}), ("test_patch", 1),
    ],
)  # fmt: skip
def test_a_malformed_instance_is_refused_by_its_field(tmp_path, image, field, value):
    (tmp_path / "swe.jsonl").write_text(json.dumps(SWE | {field: value}))
    with pytest.raises(MalformedTaskError, match=field):
        read_tasks(tmp_path / "swe.jsonl")


def test_a_report_of_tests_is_compared_with_what_must_pass(tmp_path, image):
    (tmp_path / "swe.jsonl").write_text(json.dumps(SWE))
    (candidate,) = read_tasks(tmp_path / "swe.jsonl")
    program = candidate.hidden.files["/tests/compare.py"]
    for place in ("/tests", "/logs/verifier"):
        program = program.replace(f'"{place}/', f'"{tmp_path}/')
    (tmp_path / "wanted.json").write_text(candidate.hidden.files["/tests/wanted.json"])
    passed = "PASSED tests/test_x.py::test_a\ntests/test_x.py::test_b[1] PASSED [ 50%]\n"
    failed = passed.replace("PASSED tests", "FAILED tests") + "PASSED tests/test_x.py::other\n"
    for said, reward in ((passed, "1"), (failed, "0"), ("", "0")):
        (tmp_path / "output.txt").write_text(said)
        subprocess.run(["python3", "-c", program], check=True, capture_output=True)
        assert (tmp_path / "reward.txt").read_text() == reward


def git(folder, *arguments):
    settings = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    command = ["git", *settings, "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_registry_s_data_set_comes_as_folders(tmp_path, capsys):
    repository = write(tmp_path / "repository", {f"tasks/one/{k}": v for k, v in HARBOR.items()})
    git(repository, "init", "-q")
    git(repository, "add", "-A")
    git(repository, "commit", "-qm", "tasks")
    commit = git(repository, "rev-parse", "HEAD")
    (repository / "tasks/one/instruction.md").write_text("A later one\n")
    git(repository, "commit", "-qam", "later")
    task = {"name": "one", "git_url": str(repository), "git_commit_id": commit, "path": "tasks/one"}
    registry = tmp_path / "registry"
    sets = [
        {"name": "set", "version": "1.0", "description": "", "tasks": [task]},
        {"name": "out", "version": "1", "tasks": [task | {"path": "../.."}]},
        {"name": "none", "version": "1", "tasks": [task | {"path": "absent"}]},
        {"name": "odd", "version": "1", "tasks": [task | {"git_url": "ext::sh -c id"}]},
    ]
    write(registry, {"registry.json": json.dumps(sets)})
    get = ["tasks", "get", "--registry", str(registry)]
    assert main([*get, "set@1.0", "-o", str(tmp_path / "got")]) == 0
    assert read_harbor(tmp_path / "got/one").task.instruction == "Make it work."
    for name in ("set@2", "other", "out@1", "none@1", "odd@1", "set@1.0"):
        capsys.readouterr()
        assert main([*get, name, "-o", str(tmp_path / "got")]) != 0
        assert "Traceback" not in capsys.readouterr().err


def test_what_a_folder_ships_comes_back_from_storage_and_folder(tmp_path):
    root = write(tmp_path / "t", HARBOR | {"environment/Dockerfile": "FROM debian\nCOPY . /app/\n"})
    place = root / "environment"
    (place / "run.sh").chmod(0o750)
    (place / "link").symlink_to("run.sh")
    (place / "empty").mkdir()
    (place / os.fsdecode(b"\xfe")).write_bytes(b"odd")
    os.link(place / "run.sh", place / "same.sh")
    candidate = read_harbor(root)
    kinds = {one.path: one.kind for one in candidate.task.states}
    assert kinds == {
        b"run.sh": FileKind.FILE, b"same.sh": FileKind.HARD_LINK, b"link": FileKind.LINK,
        b"empty": FileKind.FOLDER, b"\xfe": FileKind.FILE,
    }  # fmt: skip
    data = msgspec.msgpack.encode(candidate.task)
    assert msgspec.msgpack.decode(data, type=type(candidate.task)) == candidate.task


def test_a_missing_image_is_refused_with_the_command_and_another_one_when_files_change(tmp_path):
    root = tmp_path / "set"
    dockerfile = "FROM private.test/x\nRUN make\n"
    write(root / "built", HARBOR | {"environment/Dockerfile": dockerfile})
    write(root / "same", HARBOR | {"environment/Dockerfile": dockerfile})
    write(root / "bench", BENCH | {"Dockerfile": dockerfile, "solution.sh": "gold"})
    named = HARBOR | {"task.toml": '[environment]\ndocker_image = "some/where:1"\n'}
    write(root / "named", named)
    for name, command in (
        ("built", f"`penstock tasks images {root}/built`"),
        ("bench", f"`penstock tasks images {root}/bench`"),
        ("named", r"docker_image: image 'some/where:1': .*`penstock images pull some/where:1`"),
    ):
        with pytest.raises(MalformedTaskError, match=command) as caught:
            read_tasks(root / name)
        assert caught.value.image is not None
    first = missing_images(root, ReadOptions())
    assert set(first.values()) == {"built", "bench", "named"}
    bench = next(one for one, task in first.items() if task == "bench")
    assert "solution.sh" in bench.hidden
    with visible(bench) as folder:
        assert (folder / "Dockerfile").exists() and not (folder / "solution.sh").exists()
    (root / "built/environment/run.sh").write_text("other")
    again = missing_images(root, ReadOptions())
    assert set(again.values()) == {"built", "same", "bench", "named"}
    with pytest.raises(MalformedTaskError, match="expected tasks, found none"):
        missing_images(tmp_path / "set/built/environment", ReadOptions())


@pytest.mark.usefixtures("image")
def test_an_image_that_is_here_has_all_files_of_its_dockerfile(tmp_path):
    built = write(tmp_path / "a", HARBOR | {"environment/Dockerfile": "FROM x/y\nRUN make\n"})
    (candidate,) = read_tasks(built)
    assert candidate.task.image == "a" * 64 and candidate.task.contents == {}


def test_a_path_of_this_host_is_no_image(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "private", {"Dockerfile": "FROM scratch\n"})
    for name in ("private", str(tmp_path / "private")):
        settings = f'[environment]\ndocker_image = "{name}"\n'
        write(tmp_path / "set/task", HARBOR | {"task.toml": settings})
        assert main(["tasks", "images", "set", "--offline", "--json"]) == 1
        failed = json.loads(capsys.readouterr().out)["failed"]
        assert "not in the store, and offline" in failed["task"]
