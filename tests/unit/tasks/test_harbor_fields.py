"""Every field of Harbor's schema 1.4 acts, or is refused by its name; Dockerfiles likewise."""

import pytest
import tomli_w

from penstock.envs.tasks.harbor_folder import MalformedTaskError
from penstock.envs.tasks.harbor_read import read_harbor
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
    "steps": [{"name": "one"}],
    "multi_step_reward_strategy": "final",
    "artifacts": ["/app/out"],
    "more": 1,
    "task.more": 1,
    "task.name": "no-organization",
    "solution.env": {"A": "b"},
    "agent.user": "root",
    "agent.timeout_sec": 86_401,
    "agent.network_mode": "public",
    "agent.allowed_hosts": ["a.test"],
    "agent.more": 1,
    "verifier.user": 0,
    "verifier.timeout_sec": 3_601,
    "verifier.env": {"A": "${SECRET}"},
    "verifier.environment_mode": "separate",
    "verifier.environment": {"cpus": 1},
    "verifier.collect": [{"command": "c"}],
    "verifier.network_mode": "allowlist",
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
    "environment.more": 1,
}


def folder(tmp_path, settings, dockerfile=""):
    root = tmp_path / "t"
    files = {
        "task.toml": tomli_w.dumps(settings),
        "instruction.md": "Do it\n",
        "tests/test.sh": "echo 1 > /logs/verifier/reward.txt\n",
        "environment/a.py": "a = 1\n",
        "environment/src/b.py": "b = 1\n",
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
    assert candidate.task.machine == MachineNeeds(memory_mib=2048, disk_mib=512, processors=2)
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


def test_an_allow_list_becomes_rules(tmp_path):
    environment = {"network_mode": "allowlist", "allowed_hosts": ["*.Pypi.test."]}
    settings = {"version": "1.0", "environment": environment}
    egress = read_harbor(folder(tmp_path, settings)).task.egress
    assert egress == ["*.pypi.test:443", "*.pypi.test:80"]
    settings["environment"]["allowed_hosts"] = ["192.0.2.1"]
    with pytest.raises(MalformedTaskError, match=r"allowed_hosts: .*192"):
        read_harbor(folder(tmp_path, settings))


def test_penstocks_own_list_stands_for_a_public_network(tmp_path):
    settings = {"version": "1.0", "environment": {"allow_internet": True}}
    with pytest.raises(MalformedTaskError, match=r"environment\.allow_internet"):
        read_harbor(folder(tmp_path, settings))
    settings["metadata"] = {"penstock": {"egress": []}}
    assert read_harbor(folder(tmp_path, settings)).task.egress == []


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
