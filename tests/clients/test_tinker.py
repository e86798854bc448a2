"""The official `tinker` SDK and the cookbook's recipes, unmodified, against `penstock tinker`."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from tests.e2e.launched import PENSTOCK, penstock
from tests.outside_model import write_tokenizer

from penstock.actors.policy.checkpoint import save_checkpoint
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy

PROGRAM = Path(__file__).parent / "programs" / "tinker_sdk.py"
PYTHON = Path(__file__).parents[2] / ".venv-tinker" / "bin" / "python"
NAME = "Qwen/Qwen3-8B"
START_S_MAX = 120.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-tinker: make tinker-env"),
]
QUESTION = " Provide a numerical answer without units, written inside \\boxed{}."
PREFIX = [
    {"role": "user", "content": "How many r's are in strawberry?" + QUESTION},
    {"role": "assistant", "content": "\\boxed{3}"},
]


class Served:
    """A server in the background, in a folder where the model has a public one's name."""

    def __init__(self, folder: Path, model: Path, *settings: str) -> None:
        self.folder, self.runs = folder, folder / "runs"
        config = PolicyConfig(
            vocab_size=544,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=0,
            num_experts_per_tok=0,
            intermediate_size=96,
            mtp_num_heads=0,
        )
        model.mkdir(parents=True)
        policy = Policy(config, seed=0)
        with torch.no_grad():
            # Of random weights, so that adapters alone can make a token likely.
            policy.embedding.mul_(10.0)
        save_checkpoint(policy, model)
        write_tokenizer(model)
        self._url = self.runs / "t1" / "tinker_url"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        settings = (f"gateway.port={port}", "tinker.keep_steps=3", *settings)
        overrides = [word for each in settings for word in ("--set", each)]
        self._start(str(model), "--run-id", "t1", *overrides)

    def _start(self, *arguments: str) -> None:
        with (self.folder / "served.out").open("ab") as output:
            self._process = subprocess.Popen(
                [*PENSTOCK, "--runs-dir", str(self.runs), "tinker", *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._wait_for_url()

    def _wait_for_url(self) -> None:
        until = time.monotonic() + START_S_MAX
        while not self._url.is_file():
            assert self._process.poll() is None, (self.folder / "served.out").read_text()
            assert time.monotonic() < until, (self.folder / "served.out").read_text()
            time.sleep(0.2)

    def restart(self) -> None:
        """Kill the launcher, and with it all its processes; continue the run."""
        self._process.kill()
        self._process.wait()
        self._url.unlink()
        until = time.monotonic() + START_S_MAX
        while self._serving():
            assert time.monotonic() < until, "the server outlived its launcher"
            time.sleep(0.1)
        self._start("t1")

    def kill_server(self) -> None:
        """Kill the process that serves; the launcher starts another."""
        self._url.unlink()
        (server,) = self._serving()
        os.kill(server, signal.SIGKILL)
        self._wait_for_url()

    def _serving(self) -> list[int]:
        return [int(p.name) for p in Path("/proc").iterdir() if self._serves(p)]

    def _serves(self, process: Path) -> bool:
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            return b"actor" in words and str(self.runs / "t1").encode() in words
        return False

    def stop(self) -> None:
        """End it in order."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    @property
    def arguments(self) -> tuple[str, str]:
        """Address and key."""
        key = (self.runs / "t1" / "gateway_key").read_text().strip()
        return self._url.read_text(), f"tml-{key}"

    def program(self, *words: str, **more: str) -> subprocess.Popen:
        """Start a program of the SDK's environment, without any network."""
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
        home = {"HF_HOME": str(self.folder / "hf"), "TINKER_API_KEY": self.arguments[1]}
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        return subprocess.Popen(
            [str(PYTHON), *words],
            cwd=self.folder,
            env=environment | offline | home | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def replayed(self) -> dict:
        """Return the report of a replay."""
        done = penstock(self.runs, "replay", "t1", "--json", wait_s=300)
        assert done.stdout, done.stderr
        return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def served(tmp_path):
    server = Served(tmp_path, tmp_path / NAME, f"tinker.model={NAME}")
    yield server
    server.stop()


def test_every_case_of_the_sdk(served):
    output, _ = served.program(str(PROGRAM), *served.arguments, NAME).communicate(timeout=300)
    lines = [line for line in output.splitlines() if line.startswith('{"case"')]
    found = {case["case"]: case["found"] for case in map(json.loads, lines)}
    assert "refused" in found, output[-4000:]
    assert found.pop("losses") == sorted(json.loads(lines[1])["found"], reverse=True), output
    assert found.pop("logprobs differ") < 1e-3
    assert found == {
        "rank": 4,
        "sampled twice alike": True,
        "loaded alike": True,
        "saved sampler alike": True,
        "importance_sampling": found["ppo"],
        "ppo": found["ppo"],
        "cispo": found["ppo"],
        "dro": found["ppo"],
        "custom": 1.0,
        "base": found["base"],
        "refused": "loss_fn",
    }, output
    served.stop()
    report = served.replayed()
    assert report["identical"], report


def write_data(folder: Path) -> None:
    """Write what the recipes load, by the names that they ask for."""
    chats, problems = folder / "HuggingFaceH4/no_robots", folder / "openai/gsm8k"
    chats.mkdir(parents=True)
    (problems / "main").mkdir(parents=True)
    answers = [str(i % 2 + 1) for i in range(320)]
    rows = []
    for answer in answers:
        question = {"role": "user", "content": "Which?" + QUESTION}
        reply = {"role": "assistant", "content": f"\\boxed{{{answer}}}"}
        rows.append(json.dumps({"messages": [*PREFIX, question, reply]}))
    (chats / "train.jsonl").write_text("\n".join(rows))
    rows = [json.dumps({"question": "Which?", "answer": f"#### {answer}"}) for answer in answers]
    (problems / "main/train.jsonl").write_text("\n".join(rows))
    head = "---\nconfigs:\n- config_name: main\n  data_files:\n  - split: train\n"
    (problems / "README.md").write_text(head + "    path: main/train.jsonl\n---\n")


def metrics(log: Path) -> list[dict]:
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def rewards(log: Path) -> list[float]:
    return [each["reward/total"] for each in metrics(log) if "reward/total" in each]


def recipe(served, name: str, *settings: str) -> subprocess.Popen:
    url, _ = served.arguments
    shared = (f"base_url={url}", f"model_name={NAME}", "lora_rank=16", "save_every=4")
    return served.program("-m", f"tinker_cookbook.recipes.{name}", *shared, *settings)


def ended(process: subprocess.Popen) -> None:
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output[-4000:]
    assert "Training completed" in output


def test_the_recipes_and_their_replay(served, tmp_path):
    write_data(tmp_path)
    log = tmp_path / "log"
    ended(recipe(served, "sl_loop", f"log_path={log}", "batch_size=8", "learning_rate=1e-2"))
    losses = [each["train_mean_nll"] for each in metrics(log)]
    assert losses[-1] < 0.5 * losses[0], losses
    # The recipe of RL goes on from the newest checkpoint in the folder, at its number of batches.
    settings = ("batch_size=4", "group_size=8", "max_tokens=24", "max_steps=46")
    loss = "loss_fn=importance_sampling"
    learning = recipe(served, "rl_loop", f"log_path={log}", *settings, loss)
    for num_batches, kill in ((1, served.kill_server), (3, served.restart)):
        until = time.monotonic() + START_S_MAX
        while len(rewards(log)) < num_batches and learning.poll() is None:
            assert time.monotonic() < until, "the recipe does not go on"
            time.sleep(0.05)
        kill()
    ended(learning)
    assert len(rewards(log)) == 6
    assert any(0.0 < reward < 1.0 for reward in rewards(log)), rewards(log)
    served.stop()
    report = served.replayed()
    assert report["identical"], report


def test_the_page_literally(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "tinker.md").read_text()
    start, _, replay = re.findall(r"```sh\n(.+?)\n```", page)
    (code,) = re.findall(r"```python\n(.+?)```", page, re.DOTALL)
    assert start == "penstock tinker models/base --run-id t1"
    server = Served(tmp_path, tmp_path / "models" / "base")
    try:
        environment = {
            "TINKER_BASE_URL": server.arguments[0],
            "BASE": str(tmp_path / "models/base"),
        }
        program = server.program("-c", code, **environment)
        output, _ = program.communicate(timeout=300)
        assert program.returncode == 0, output
        losses = [float(line.split()[0]) for line in output.splitlines() if " {" in line]
        assert len(losses) == 5
        assert losses[-1] < losses[0]
        assert "/weights/first" in output
    finally:
        server.stop()
    assert replay == "penstock replay t1"
    done = penstock(server.runs, *replay.split()[1:], wait_s=300)
    assert done.returncode == 0, done.stderr
    assert "identical, bit for bit" in done.stdout
