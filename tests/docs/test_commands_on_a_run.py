"""The commands that pages print about a run and a service, executed as printed on a small one.

One run of three steps serves them all. What reads it is executed in this process, what talks to a
service by a shell, in the folder that holds `runs`.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.docs.commands import (
    ERASING,
    JUDGES,
    ROOT,
    SERVED,
    SERVING,
    SINKS,
    SLOW,
    Command,
    blocks,
    commands,
    execute,
    joined,
)
from tests.docs.judge import judging
from tests.e2e.launched import TINY, penstock

pytestmark = [pytest.mark.slow, pytest.mark.vm, pytest.mark.timeout(1800, func_only=True)]

WAIT_S = 1500.0
"""On a machine with much other work."""
SMALL = ("trainer.steps_max=3", "trainer.checkpoint_steps=1", "users.num_requests=1",
         "prepare.num_heldout_tasks=2", "evaluator.num_eval_tasks=2",
         f"run.wall_s_max={WAIT_S}")  # fmt: skip
"""Settings of the run; its log without keys still has a step that no user's content is in."""
OUTPUTS = {"DIR", "OUT", "model", "v0", "rloo", "ppo", "short", "traces.jsonl"}
"""Written by more than one page."""
NAMES = {"RUN": "r1", "[RUN]": "r1", "latest": "r1", "base": "r1", "sft": "r1", "NAME": "policy"}
ENDED = {0, 1, 3, 5}
"""Exit codes of an agent whose endpoint answered; what an untrained policy does is up to it."""


def printed(*beginnings: str) -> list[Command]:
    """Return the commands, one where pages mean the same by `r1`, `latest` and `RUN`."""
    found: dict[tuple[str, ...], Command] = {}
    for each in commands():
        if each.text.startswith(beginnings):
            found.setdefault(tuple(NAMES.get(word, word) for word in each.words), each)
    return list(found.values())


def each_of(*beginnings: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("command", printed(*beginnings), ids=lambda each: each.name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run, its exported model, and what pages name beside it."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "infra").symlink_to(ROOT / "infra")
    words = ["penstock", "run", "--config", str(TINY), "--run-id", "r1", "--no-replay"]
    words += [word for setting in SMALL for word in ("--set", setting)]
    with contextlib.chdir(folder):
        for line in (joined(words), "penstock export r1 -o FOLDER"):
            done = in_shell(line)
            assert done.returncode == 0, done.stdout + done.stderr
            Path(f"{line.split()[1]}.out").write_text(done.stdout)
    (folder / "WORKSPACE").mkdir()
    (folder / "WORKSPACE" / "one.py").write_text("ONE = 1\n")
    subprocess.run(["git", "init", "--quiet", folder / "WORKSPACE"], check=True)
    shutil.copy(folder / "runs/r1/gateway_key", folder / "FILE")
    return folder


@pytest.fixture(scope="module")
def episode(folder: Path) -> str:
    told = penstock(folder / "runs", "log", "cat", "r1", "--type", "RolloutFinished", wait_s=WAIT_S)
    return json.loads(told.stdout.splitlines()[0])["rollout_id"]


@pytest.fixture(autouse=True)
def there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)


@each_of(*SLOW)
def test_commands_on_a_run(command: Command, folder: Path, episode: str):
    for name in OUTPUTS.intersection(command.words):
        shutil.rmtree(name, ignore_errors=True)
        Path(name).unlink(missing_ok=True)
    if command.text.startswith("python -m tests.lab fidelity") and not Path("b.json").exists():
        execute("python -m tests.lab fidelity probe --backend uml -o b.json")
        shutil.copy("b.json", "a.json")
    execute(command, **(NAMES | {"latest": "latest", "EPISODE": episode}))


@each_of(*JUDGES)
def test_commands_of_judges(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", "sk-of-the-page")
    with judging(folder):
        execute(command)
    assert Path(
        "calibration.json" if "calibrate" in command.words else "runs/r1/audit.json"
    ).exists()


class OtlpReceiver(BaseHTTPRequestHandler):
    """Takes everything: an empty answer is OTLP's for that."""

    def do_POST(self) -> None:
        """Take a request."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()


@each_of(*SINKS)
def test_commands_of_sinks(command: Command):
    name = command.words[2]
    pytest.importorskip({"otel": "opentelemetry.proto"}.get(name, name), reason="needs its extra")
    with HTTPServer(("localhost", 4318 if name == "otel" else 0), OtlpReceiver) as receiver:
        threading.Thread(target=receiver.serve_forever, daemon=True).start()
        execute(command)
        receiver.shutdown()
    assert Path(f"runs/r1/sinks/{name}").exists()


def test_the_next_steps_that_a_run_prints_work():
    _, said = Path("run.out").read_text().split("next:\n")
    steps = re.findall(r"\]   (\S.*)", said)
    assert len(steps) == 5
    shutil.rmtree("model", ignore_errors=True)
    for step in steps:
        if " serve " in step:
            assert Serving(step).stop() == 0
        else:
            done = in_shell(step)
            assert done.returncode == 0, step + done.stdout[-2000:] + done.stderr[-2000:]


@each_of(*ERASING)
def test_commands_that_erase(command: Command):
    execute(command, U="k-local")


class Serving:
    """A printed command that serves, in the background."""

    def __init__(self, line: str) -> None:
        self._words = Path("serving.out")
        with self._words.open("wb") as out:
            self.process = subprocess.Popen(
                ["/bin/sh", "-c", f"exec {line}"], stdout=out, stderr=out, env=environment(),
                process_group=0,
            )  # fmt: skip
        self.url = self._until_it_answers()

    def _until_it_answers(self) -> str:
        deadline = time.monotonic() + WAIT_S
        while True:
            said = self._words.read_text()
            assert self.process.poll() is None and time.monotonic() < deadline, said
            if found := re.search(r"live page: (http://\S+)/ ", said):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{found[1]}/readyz"):
                    return found[1]
            time.sleep(0.2)

    def stop(self) -> int:
        """Press Ctrl-C; return the exit code."""
        os.killpg(self.process.pid, signal.SIGINT)
        try:
            return self.process.wait(WAIT_S)
        finally:
            self.process.kill()


def environment() -> dict[str, str]:
    """Return that of a shell in which the environment is activated."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def in_shell(text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/sh", "-c", text], input="", capture_output=True, text=True, timeout=WAIT_S,
        env=environment(), check=False,
    )  # fmt: skip


def filled(command: Command, url: str) -> str:
    """Return a command with the names of this folder in place of the page's."""
    key = Path("FILE").read_text().strip()
    known = NAMES | {"latest": "latest", "http://host/v1": f"{url}/v1"}
    known |= {"DIR": "WORKSPACE", "...": "Look at one.py", "30": "0.01"}  # Minutes.
    words = [known.get(word, word) for word in command.words]
    words = [f"PENSTOCK_AGENT_KEY={key}" if "AGENT_KEY=" in word else word for word in words]
    return joined(words).replace("'PENSTOCK_AGENT_KEY=", "PENSTOCK_AGENT_KEY='")


@each_of(*SERVING)
def test_commands_that_serve(command: Command):
    if "gateway.port=8080" in command.words or "FOLDER" in command.words:
        with contextlib.closing(socket.socket()) as tried:
            if tried.connect_ex(("127.0.0.1", 8080)) == 0:
                pytest.skip("another program has port 8080")
    before = set(Path("runs").iterdir())
    assert Serving(filled(command, "")).stop() == 0
    for new in set(Path("runs").iterdir()) - before:  # Of a model's folder; `latest` is r1 again.
        shutil.rmtree(new)


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Serving]:
    with contextlib.chdir(folder):
        serving = Serving("penstock serve")
        yield serving
        assert serving.stop() == 0


@each_of(*SERVED)
def test_commands_on_a_service(command: Command, service: Serving):
    line, codes = filled(command, service.url), {0}
    if "agent" in command.words:
        codes = ENDED
    elif "top" in command.words:
        line, codes = f"timeout --foreground --signal INT 5 {line}", {124}
    done = in_shell(line)
    assert done.returncode in codes, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_client_of_the_page_is_answered(service: Serving):
    page = ROOT / "docs" / "live.md"
    [code] = [each for *_, each in blocks(page) if "OpenAI(" in each]
    found: dict[str, Any] = {}
    exec(code.replace("<id>", "r1"), found)
    assert found["reply"].choices[0].message.role == "assistant"
