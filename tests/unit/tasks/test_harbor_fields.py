"""Every field of Harbor's schema 1.4 acts, or is refused by its name; Dockerfiles likewise."""

import pytest
import tomli_w

from penstock.envs.tasks.harbor.folder import MalformedTaskError
from penstock.envs.tasks.harbor.read import ReadOptions, read_harbor
from penstock.messages.task import MachineNeeds

WHOLE = {
    "schema_version": "1.4",
    "source": "somewhere",
    "task": {
        "name": "org/name", "version": "1", "description": "d", "keywords": ["k"],
        "authors": [{"name": "a", "email": "a@b.c"}],
    },
    "metadata": {"anything": {"goes": 1}},
    "agent": {"timeout_sec": 7200, "network_mode": "no-network"},
    "verifier": {
        "timeout_sec": 900, "env": {"A": "b"}, "environment_mode": "shared",
        "network_mode": "no-network", "collect": [],
    },
    "environment": {
        "build_timeout_sec": 60.0, "os": "Linux", "cpus": 1.5, "memory": "2G", "storage_mb": 512,
        "gpus": 0, "workdir": "/app", "network_mode": "no-network", "mcp_servers": [], "env": {},
    },
    "solution": {"env": {}},
    "artifacts": [],
}  # fmt: skip
SERVER = {"name": "s", "transport": "stdio", "command": "c"}
REFUSED = {
    "multi_step_reward_strategy": "final",
    "artifacts": ["/app/out"],
    "task.name": "no-organization",
    "solution.env": {"A": "${SECRET}"},
    "agent.user": "root",
    "agent.timeout_sec": 86_401,
    "agent.allowed_hosts": ["a.test"],
    "verifier.user": 0,
    "verifier.timeout_sec": 3_601,
    "verifier.env": {"A": "${SECRET}"},
    "verifier.environment_mode": "separate",
    "verifier.environment": {"cpus": 1},
    "verifier.collect": [{"command": "c"}],
    "verifier.allowed_hosts": ["a.test"],
    "environment.os": "windows",
    "environment.gpus": 1,
    "environment.gpu_types": ["H100"],
    "environment.tpu": {"type": "v4", "topology": "2x2"},
    "environment.cpus": "many",
    "environment.memory": "2X",
    "environment.storage": "3G",
    "environment.mcp_servers": [SERVER],
    "environment.env": {"A": "b"},
    "environment.skills_dir": "/skills",
    "environment.healthcheck": {"command": "true"},
    "environment.workdir": "/srv",
    "environment.allowed_hosts": ["a.test"],
}


STEP = {
    "name": "one", "min_reward": 0.5, "agent": {"timeout_sec": 60}, "artifacts": [],
    "verifier": {"timeout_sec": 60, "env": {"A": "b"}, "environment_mode": "shared"},
}  # fmt: skip
WHOLE_STEPS = WHOLE | {
    "multi_step_reward_strategy": "final", "steps": [STEP, {"name": "two"}],
}  # fmt: skip
REFUSED_STEP = {
    "name": "../out",
    "name ": "TWO",
    "more": 1,
    "min_reward": {"tests": 1.0},
    "min_reward ": True,
    "healthcheck": {"command": "true"},
    "artifacts": ["/app/out"],
    "agent.user": "root",
    "agent.timeout_sec": 0,
    "agent.network_mode": "no-network",
    "agent.allowed_hosts": ["a.test"],
    "agent.more": 1,
    "verifier.user": 0,
    "verifier.timeout_sec": 3_601,
    "verifier.env": {"A": "${SECRET}"},
    "verifier.environment_mode": "separate",
    "verifier.environment": {"cpus": 1},
    "verifier.collect": [{"command": "c"}],
    "verifier.allowed_hosts": ["a.test"],
    "verifier.more": 1,
}
"""A blank at the end of a field: a second wrong value of it."""


def folder(tmp_path, settings, dockerfile=""):
    root = tmp_path / "t"
    files = {
        "task.toml": tomli_w.dumps(settings),
        "instruction.md": "Do it\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "environment/a.py": "a = 1\n",
        "environment/src/b.py": "b = 1\n",
        "steps/one/instruction.md": "Do one\n",
        "steps/one/workdir/c.py": "c = 1\n",
        "steps/one/solution/solve.sh": "true\n",
        "steps/two/instruction.md": "Do two\n",
        "steps/two/workdir/setup.sh": "true\n",
        "steps/two/tests/test.sh": "true\n",
        "solution/solve.sh": "false\n",
    } | ({"environment/Dockerfile": dockerfile} if dockerfile else {})
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def changed(field, value):
    table, _, name = field.rpartition(".")
    inner = WHOLE[table] | {name: value} if table else value
    return WHOLE | {table or name: inner}


def test_all_fields_that_act(tmp_path):
    candidate = read_harbor(folder(tmp_path, WHOLE))
    assert candidate.task.limits.wall_s_max == 7200 and candidate.hidden.timeout_s == 900
    assert candidate.task.machine == MachineNeeds(memory_mib=2048)
    assert [one.partition(":")[0] for one in candidate.adapted] == [
        "environment.cpus", "environment.storage_mb"
    ]  # fmt: skip
    assert candidate.origin.repository == "org/name" and candidate.task.egress == []
    assert candidate.hidden.argv[:2] == ["env", "A=b"]


def test_harbors_own_defaults(tmp_path):
    candidate = read_harbor(folder(tmp_path, {"version": "1.0"}))
    assert candidate.hidden.timeout_s == 600.0
    assert candidate.task.limits.wall_s_max == 86_400.0  # Harbor's is none: the longest there is.


@pytest.mark.parametrize("field", REFUSED)
def test_what_no_machine_gives_is_refused_by_its_name(tmp_path, field):
    with pytest.raises(MalformedTaskError, match=rf"task\.toml: {field.replace('.', '[.]')}\b"):
        read_harbor(folder(tmp_path, changed(field, REFUSED[field])))


def test_the_fields_of_steps_act(tmp_path):
    settings = WHOLE_STEPS | {"agent": {"timeout_sec": 7200}}
    candidate = read_harbor(folder(tmp_path, settings))
    task, hidden = candidate.task, candidate.hidden
    assert (task.instruction, task.has_setup) == ("Do one", False)
    assert task.files == {"a.py": "a = 1\n", "src/b.py": "b = 1\n", "c.py": "c = 1\n"}
    [two] = task.steps
    assert (two.instruction, two.has_setup, two.files) == ("Do two", True, {"setup.sh": "true\n"})
    assert task.limits.wall_s_max == 7260 and task.limits.num_turns_max == 16
    assert hidden.is_last_step_all and hidden.min_reward == 0.5
    [later] = hidden.steps
    assert (hidden.timeout_s, later.timeout_s, later.min_reward) == (60, 900, None)
    assert (hidden.argv[1], later.argv[1]) == ("A=b", "A=b")
    assert hidden.files["/tests/test.sh"].startswith("echo 1")
    assert later.files["/tests/test.sh"] == "true\n"
    assert hidden.gold_files["/solution/solve.sh"] == "true\n"
    assert later.gold_files["/solution/solve.sh"] == "false\n"  # The task's own.


@pytest.mark.parametrize("field", REFUSED_STEP)
def test_what_a_step_cannot_have_is_refused_by_its_name(tmp_path, field):
    table, _, name = field.strip().rpartition(".")
    value = REFUSED_STEP[field]
    changed = STEP | {table or name: STEP[table] | {name: value} if table else value}
    settings = WHOLE_STEPS | {"steps": [{"name": "two"}, changed]}
    named = rf"task\.toml: steps\[1\]\.{field.strip().replace('.', '[.]')}\b"
    with pytest.raises(MalformedTaskError, match=named):
        read_harbor(folder(tmp_path, settings))


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        ("steps/two/instruction.md", "steps/two/instruction.md: expected a file"),
        ("tests/test.sh", "steps/one/tests/test.sh: expected it, or tests/test.sh"),
    ],
)
def test_what_a_step_lacks_is_named(tmp_path, absent, words):
    root = folder(tmp_path, WHOLE_STEPS)
    (root / absent).unlink()
    with pytest.raises(MalformedTaskError, match=words):
        read_harbor(root)
    (root / absent).write_text("exit 0\n")
    (root / "instruction.md").unlink()  # Of no use where there are steps.
    read_harbor(root)
    (root / "steps/one/trajectory.json").write_text("{}")
    with pytest.raises(MalformedTaskError, match=r"one/trajectory\.json"):
        read_harbor(root)


def test_an_allow_list_becomes_rules(tmp_path):
    environment = {"network_mode": "allowlist", "allowed_hosts": ["*.Pypi.test."]}
    settings = {"version": "1.0", "environment": environment}
    egress = read_harbor(folder(tmp_path, settings)).task.egress
    assert egress == ["*.pypi.test:443", "*.pypi.test:80"]
    settings["environment"]["allowed_hosts"] = ["192.0.2.1"]
    with pytest.raises(MalformedTaskError, match=r"allowed_hosts: .*192"):
        read_harbor(folder(tmp_path, settings))


def test_the_internet_is_the_rules_that_stand_for_it(tmp_path):
    settings = {"version": "1.0", "environment": {"allow_internet": True}}
    root = folder(tmp_path, settings)
    candidate = read_harbor(root, ReadOptions(internet=("a.test:443",)))
    assert candidate.task.egress == candidate.hidden.egress == ["a.test:443"]
    assert candidate.adapted == ["network: the internet is 1 rules here"]
    assert "pypi.org:443" in read_harbor(root).task.egress
    with pytest.raises(MalformedTaskError, match=r"network: expected none, offline"):
        read_harbor(root, ReadOptions(is_offline=True))
    settings["metadata"] = {"penstock": {"egress": []}}
    assert read_harbor(folder(tmp_path, settings)).task.egress == []


def test_fields_that_harbor_does_not_know_are_kept_and_named(tmp_path):
    settings = WHOLE | {"workstream": "x", "task": WHOLE["task"] | {"format": 1, "language": "c"}}
    adapted = read_harbor(folder(tmp_path, settings)).adapted
    kept = {
        f"{name}: kept, without effect" for name in ("workstream", "task.format", "task.language")
    }
    assert kept < set(adapted)


def test_a_variable_of_the_host_s_is_its_default(tmp_path):
    env = {"KEY": "${SECRET:-}", "MODE": "${MODE:-fast}", "A": "b"}
    candidate = read_harbor(folder(tmp_path, changed("verifier.env", env)))
    assert candidate.hidden.argv[1:4] == ["KEY=", "MODE=fast", "A=b"]


def test_all_that_is_wrong_is_told_at_once(tmp_path):
    settings = changed("environment.skills_dir", "/s")
    settings["environment"]["healthcheck"] = {"command": "true"}
    root = folder(tmp_path, settings, "FROM private.test/x\nRUN make\n")
    (root / "instruction.md").unlink()
    (root / "environment/docker-compose.yaml").write_text("")
    with pytest.raises(MalformedTaskError) as caught:
        read_harbor(root)
    told = " ".join(caught.value.reasons)
    for words in ("skills_dir", "healthcheck", "FROM", "instruction.md", "docker-compose.yaml"):
        assert words in told
    assert caught.value.image is None


@pytest.mark.parametrize("name", ["trajectory.json", "environment/docker-compose.yaml"])
def test_files_that_ask_for_more_are_refused(tmp_path, name):
    root = folder(tmp_path, {"version": "1.0"})
    (root / name).write_text("{}")
    with pytest.raises(MalformedTaskError, match=name):
        read_harbor(root)


BASE = "FROM docker.io/library/python:3.12-slim\n"


@pytest.mark.parametrize(
    ("dockerfile", "instruction"),
    [
        ("FROM node:20\n", "FROM"),
        (f"{BASE}FROM debian\n", "FROM"),
        (f"{BASE}RUN apt-get install -y git\n", "RUN"),
        (f"{BASE}ENV A=b\n", "ENV"),
        (f"{BASE}USER agent\n", "USER"),
        (f'{BASE}ENTRYPOINT ["x"]\n', "ENTRYPOINT"),
        (f"{BASE}HEALTHCHECK CMD true\n", "HEALTHCHECK"),
        (f"{BASE}WORKDIR /srv\n", "WORKDIR"),
        (f"{BASE}COPY --from=build /x /app/\n", "COPY"),
        (f"{BASE}COPY --chmod=755 a.py /app/\n", "COPY"),
        (f"{BASE}COPY a.py /etc/\n", "COPY"),
        (f"{BASE}COPY absent /app/\n", "COPY"),
        (f"{BASE}COPY *.py /app/\n", "COPY"),
        (f"{BASE}ADD https://x.test/y /app/\n", "COPY"),
        (f"{BASE}COPY $WHAT /app/\n", "COPY"),
        (f"{BASE}NONSENSE\n", "NONSENSE"),
    ],
)
def test_an_instruction_that_needs_a_layer_is_refused_by_its_name(
    tmp_path, dockerfile, instruction
):
    root = folder(tmp_path, {"version": "1.0"}, dockerfile)
    with pytest.raises(MalformedTaskError, match=rf"Dockerfile: {instruction}: "):
        read_harbor(root)
    image = {"version": "1.0", "environment": {"docker_image": f"sha256:{'ab' * 32}"}}
    read_harbor(folder(tmp_path, image, dockerfile))


def test_instructions_that_act_or_have_no_effect(tmp_path):
    lines = "LABEL a=b\nARG X\nEXPOSE 80\nWORKDIR /app\nCOPY --chown=1:1 a.py src ./\nCMD x\n"
    root = folder(tmp_path, {"version": "1.0"}, BASE + lines)
    assert read_harbor(root).task.files == {"a.py": "a = 1\n", "b.py": "b = 1\n"}
    (root / "environment" / "files").mkdir()
    (root / "environment" / "files" / "c.py").write_text("c")
    assert "c.py" not in read_harbor(root).task.files  # The Dockerfile decides.
