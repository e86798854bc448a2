"""A whole run on tasks of several images, on two hosts, with a way out for one of them.

The policy learns one turn by heart before it is trained: to run the task's own `try.sh`. So every
kind of task is attempted for certain, and what is seen is the machines' doing.
"""

import asyncio
import json
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import tomli_w
from tests.needs import need_layers

from penstock.envs.harness.tool_calls import ToolResult
from penstock.envs.microvm.images.assets import load_assets, vm_cache_dir
from penstock.envs.microvm.images.layers import image_digest, layer_path
from penstock.envs.microvm.recipe.layer import LayerSources, build_layer
from penstock.examples.quickstart import midtrain_data
from penstock.examples.quickstart.ladder.transcripts import DemonstratedTurn, Transcript
from penstock.infra.config.file import apply_overrides, parse_config, read_toml
from penstock.infra.run.prepare import build
from penstock.infra.run.runs import RunDir
from penstock.messages.rollout import ToolCall

from .launched import TINY, Launched, gone, machines, penstock

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(500)]

STEPS = 8
PACKAGES = "/usr/local/lib/python3.11/dist-packages"
TRY = ToolCall(name="run_terminal", arguments={"command": "sh try.sh"})
TOML = """\
version = "1.0"
[metadata.penstock]
category = "{name}"
split = "{split}"
limits = {{ num_turns_max = 3, num_tokens_max = 900, turn_tokens_max = 64, tool_s_max = 60.0 }}
{egress}
[verifier]
timeout_sec = 60.0
[environment]
{image}
"""
ASK = "python3 -c \"import {name}; open('answer.txt', 'w').write({name}.WHO)\"\n"
CHECK = """\
mkdir -p /logs/verifier
if [ "$(cat /app/answer.txt)" = "{answer}" ]; then reward=1; else reward=0; fi
echo $reward > /logs/verifier/reward.txt
"""
FETCH = """\
python3 - <<'END'
import urllib.request
for url in ("http://good.test:{port}/", "http://evil.test/"):
    try:
        text = urllib.request.urlopen(url, timeout=50).read().decode()
        open("answer.txt", "w").write(text)
    except OSError as error:
        print(error)
END
"""


def write_task(root, name, script, answer, *, image="", egress="", split="train"):
    files = {
        "task.toml": TOML.format(
            name=name,
            split=split,
            egress=f'egress = ["{egress}"]' if egress else "",
            image=f'docker_image = "{image}"' if image else "",
        ),
        "instruction.md": "Run try.sh\n",
        "environment/files/try.sh": script,
        "tests/test.sh": CHECK.format(answer=answer),
    }
    for path, text in files.items():
        place = root / name / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The machine's own cache with layers `alpha` and `beta`: a Python module of each name."""
    need_layers()
    theirs, ours = vm_cache_dir().parent, tmp_path / "cache"
    (ours / "vm").mkdir(parents=True)
    for path in theirs.iterdir():
        if path.name != "vm":
            (ours / path.name).symlink_to(path)
    for path in (theirs / "vm").iterdir():
        if path.is_file() and path.name != "build.lock":
            (ours / "vm" / path.name).symlink_to(path)
    monkeypatch.setenv("PENSTOCK_CACHE", str(ours))
    for name in ("alpha", "beta"):
        source = tmp_path / "sources" / name
        source.mkdir(parents=True)
        (source / f"{name}.py").write_text(f"WHO = {name!r}\n")
        sources = LayerSources(folder=source, target=PACKAGES)
        build_layer(name, sources, ours / "vm", lambda line: None)
    return ours / "vm"


@pytest.fixture
def port():
    class Page(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("content-length", "7")
            self.end_headers()
            self.wfile.write(b"fetched")

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()


def by_heart(repositories, habits, rng, harness):
    """Demonstrate nothing but the one turn."""
    turns = (
        DemonstratedTurn((TRY,), (ToolResult(name=TRY.name, text="[no output]"),)),
        DemonstratedTurn(
            (ToolCall(name="finish", arguments={}),),
            (ToolResult(name="finish", text="done", is_finish=True),),
        ),
    )
    return [Transcript("Run try.sh", turns, harness) for _ in repositories]


def prepare(folder: RunDir, overrides, monkeypatch):
    data = apply_overrides(read_toml(TINY), overrides)
    folder.path.mkdir()
    folder.config.write_text(tomli_w.dumps(data))
    config = parse_config(data, "test")
    monkeypatch.setattr(midtrain_data, "attempts", by_heart)
    objects = build(config, threading.Event())
    for key, content in objects.items():
        asyncio.run(folder.store().put(key, content))


def logged(run, event_type):
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", event_type)
    return [json.loads(line) for line in told.stdout.splitlines()]


def layer_of(cache, name) -> Path:
    digest = json.loads((cache / "images" / f"{name}.json").read_bytes())["digest"]
    return layer_path(cache / "images", digest)


def test_tasks_run_and_are_graded_on_their_images(tmp_path, cache, port, monkeypatch):
    tasks = tmp_path / "tasks"
    for name in ("alpha", "beta"):
        write_task(tasks, name, ASK.format(name=name), name, image=name)
    write_task(tasks, "web", FETCH.format(port=port), "fetched",
               egress=f"good.test:{port}@127.0.0.1")  # fmt: skip
    write_task(tasks, "absent", "true\n", "", image=f"org/absent@sha256:{'ab' * 32}")
    write_task(tasks, "heldout", ASK.format(name="alpha"), "alpha", image="alpha", split="heldout")
    own = tmp_path / "own"
    overrides = (
        f"prepare.tasks={tasks}",
        "prepare.corpora.settings.num_demonstrations=400",
        "prepare.corpora.settings.code_tokens=1000",
        "prepare.corpora.settings.context_weight=0.0",
        "prepare.corpora.settings.drill_tokens=0",
        "trainer.midtrain.num_tokens=60000",
        "trainer.midtrain.batch_tokens=1024",
        "trainer.midtrain.learning_rate=0.005",
        f"trainer.steps_max={STEPS}",
        'processes.machines=["sandbox_host:a", "judge"]',
        'processes.machines-b=["sandbox_host:b"]',
        'processes.scheduler=["scheduler"]',
        "sandbox_host.reports_to_scheduler=true",
        "sandbox_host.egress_addresses=true",
        f"sandbox_host.images={own}",
        "rollout_worker.places_groups=true",
        "evaluator.num_eval_tasks=1",
        "prepare.evaluates_unseparated=true",
    )
    prepare(RunDir(tmp_path / "r1"), overrides, monkeypatch)
    before = machines()
    run = Launched(tmp_path, resume=True)
    try:
        assert run.wait(400.0) == 0, run.output
    finally:
        run.end()
    assert gone(machines() - before)
    rollouts = {r["rollout_id"]: r for r in logged(run, "RolloutFinished")}
    verdicts = logged(run, "Verdict")
    solved = defaultdict(list)
    for verdict in verdicts:
        if verdict["outcome"] == "solved":
            solved[verdict["category"]].append((verdict, rollouts[verdict["rollout_id"]]))
    assert {"alpha", "beta", "web"} <= set(solved), {v["category"]: v["outcome"] for v in verdicts}
    base = load_assets(cache)[1].image_digest
    for name, pairs in solved.items():
        layer = layer_of(cache, "alpha" if name == "heldout" else name) if name != "web" else None
        ran = [rollout["sandbox"] for _, rollout in pairs]
        graded = [verdict["sandbox"] for verdict, _ in pairs if "sandbox" in verdict]
        assert graded  # What was left alike is not graded twice.
        assert {each["image_digest"] for each in ran + graded} == {image_digest(base, layer)}
    kinds = {one["kind"] for verdict, _ in solved["web"] for one in verdict["findings"]}
    assert kinds == {"egress"}
    attempts = [one for _, rollout in solved["web"] for one in rollout["egress"]]
    told = {(one["target"], one["is_allowed"]) for one in attempts}
    assert told == {(f"good.test:{port}", True), ("evil.test:80", False)}
    lost = [r for r in rollouts.values() if r["task_id"] == "absent"]
    assert lost
    assert {r["end"] for r in lost} == {"infrastructure_error"}
    assert all("image absent" in r["error"] for r in lost)
    layers = {layer_of(cache, name).name for name in ("alpha", "beta")}
    assert {path.name for path in own.glob("*/*")} == layers
    run.check_sound(steps=STEPS)
