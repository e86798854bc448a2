"""A run that mid-trains on own corpora, killed in the middle: the bits of one that is not."""

import contextlib
import json
import shutil
import time
from pathlib import Path

import pytest
import tomli_w
from tests.e2e.launched import TINY, Launched, gone, machines, penstock

from penstock.actors.trainer.midtraining.saves import read_head

pytestmark = [pytest.mark.vm, pytest.mark.slow, pytest.mark.timeout(3600)]

WAIT_S = 1500.0
"""On a machine with much other work."""
POLL_S = 0.02
READ = {"name": "read_file", "arguments": '{"path": "m.py"}'}
MESSAGES = [
    {"role": "user", "content": "Mend f in m.py"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": READ}]},
    {"role": "tool", "tool_call_id": "c", "content": "def f(a):\n    return a"},
    {"role": "assistant", "content": "It is right as it is."},
]
MIDTRAIN = {"num_tokens": 60_000, "report_steps": 1, "save_s": 0.001}
"""Thirty steps, each of them saved."""


def write_corpora(folder: Path) -> list[dict[str, object]]:
    """Write a folder of files, lines and rows; return the tables that name them."""
    arrow = pytest.importorskip("pyarrow", reason="pip install -e '.[parquet]'")
    parquet = pytest.importorskip("pyarrow.parquet")
    sources = folder / "sources"
    sources.mkdir(parents=True)
    for path in sorted(TINY.parent.glob("*.py")):
        shutil.copy(path, sources)
    lines = folder / "chats.jsonl"
    lines.write_text(f"{json.dumps({'messages': MESSAGES})}\n" * 30)
    texts = [f"def add_{n}(a):\n    return a + {n}\n" for n in range(200)]
    parquet.write_table(arrow.table({"text": texts}), folder / "texts.parquet")
    rows = arrow.table({"messages": [json.dumps(MESSAGES)] * 30})
    parquet.write_table(rows, folder / "chats.parquet")
    return [
        {"path": str(sources), "weight": 0.5},
        {"path": str(lines), "kind": "messages"},
        {"path": str(folder / "texts.parquet"), "tokens_max": 2000},
        {"path": str(folder / "chats.parquet"), "kind": "messages"},
    ]


@pytest.fixture
def launch(tmp_path):
    """Start runs of one step after mid-training, or go on with one."""
    config = tmp_path / "own.toml"
    tables = {
        "base": str(TINY),
        "model": {"corpora": write_corpora(tmp_path / "mine")},
        "trainer": {"steps_max": 1, "midtrain": MIDTRAIN},
        "prepare": {
            "num_train_tasks": 4,
            "num_heldout_tasks": 1,
            "corpora": {"settings": {"code_tokens": 0}},
        },
        "evaluator": {"num_eval_tasks": 1},
        "run": {"wall_s_max": WAIT_S},
    }
    config.write_text(tomli_w.dumps(tables))
    started = []

    def launched(run_id: str, *, resume: bool = False) -> Launched:
        started.append(Launched(tmp_path, run_id=run_id, resume=resume, config=config))
        return started[-1]

    yield launched
    for run in started:
        run.end()


def until_it_goes_on(run: Launched) -> None:
    """Wait for a save of a trainer that went on from another one's."""
    for _ in range(int(WAIT_S / POLL_S)):
        for path in run.folder.glob("objects/midtrain/saves/[0-9]*"):
            with contextlib.suppress(FileNotFoundError):  # A newer one took its place.
                if read_head(path.read_bytes(), path.name).num_resumed:
                    return
        assert run.process.poll() is None, run.output
        time.sleep(POLL_S)
    raise AssertionError(run.output)


def completed(run: Launched) -> dict[str, object]:
    told = penstock(run.runs, "log", "cat", run.folder.name, "--type", "MidtrainCompleted")
    [event] = [json.loads(line) for line in told.stdout.splitlines()]
    return event


def weights_of(run: Launched) -> dict[str, bytes]:
    folder = run.runs / f"{run.folder.name}-model"
    done = penstock(run.runs, "export", run.folder.name, "--version", "0", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}


def test_a_run_that_is_killed_in_mid_training_ends_with_the_bits_of_one_that_is_not(launch):
    whole = launch("whole")
    assert whole.wait(WAIT_S) == 0, whole.output
    before = machines()
    killed = launch("killed")
    killed.until("mid-training ", wait_s=WAIT_S)
    killed.kill("actor", "trainer")
    until_it_goes_on(killed)
    of_run = set(killed.processes()) | (machines() - before)
    killed.process.kill()
    assert gone(of_run | (machines() - before))
    again = launch("killed", resume=True)
    assert again.wait(WAIT_S) == 0, again.output
    again.check_sound(steps=1)

    expected, found = completed(whole), completed(again)
    assert (expected.get("num_resumed", 0), found["num_resumed"]) == (0, 2)
    for field in ("num_tokens", "loss_first", "loss_last", "heldout_loss", "weights_digest"):
        assert found[field] == expected[field], field
    assert found["loss_last"] < found["loss_first"]
    weights = weights_of(whole)
    assert weights and weights_of(again) == weights
