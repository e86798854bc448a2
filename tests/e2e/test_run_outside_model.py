"""Whole runs from models that transformers made: in, trained, replayed, out, in again."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from tests.outside_model import write_model

from penstock.actors.policy.checkpoint import load_checkpoint

from .launched import TINY, Launched, penstock

transformers = pytest.importorskip("transformers")
pytest.importorskip("renderers")
pytestmark = [
    pytest.mark.vm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),
]
STEPS = 2
TRACE = {
    "messages": [
        {"role": "user", "content": "Mend f in m.py"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {
                    "id": "c",
                    "type": "function",
                    "function": {"name": "read_file", "arguments": '{"path": "m.py"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "def f(): return 1"},
        {"role": "assistant", "content": "It is right as it is."},
    ]
}


def config_from(folder: Path, checkpoint: Path, **tables) -> Path:
    """Write a configuration of a tiny run that starts from a model."""
    config = tomllib.loads(TINY.read_text())
    del config["policy"], config["trainer"]["midtrain"]
    config["model"] = {"checkpoint": str(checkpoint), "chat": "renderers:qwen3"} | tables.pop(
        "model", {}
    )
    config["generator"] = {"num_tokens_max": 3072, "num_running_max": 16}
    config["prepare"] |= {"num_train_tasks": 8}
    config["prepare"]["limits"] = {"num_turns_max": 2, "num_tokens_max": 3072}
    config["prepare"]["limits"]["turn_tokens_max"] = 16
    config["evaluator"]["num_eval_tasks"] = 2
    config["trainer"] |= {"steps_max": STEPS} | tables
    path = folder / "config.toml"
    path.write_text(tomli_w.dumps(config))
    return path


def run_from(tmp_path: Path, checkpoint: Path, **tables) -> Launched:
    runs = tmp_path / "runs"
    runs.mkdir()
    launched = Launched(runs, config=config_from(tmp_path, checkpoint, **tables))
    code = launched.wait(200.0)
    assert code == 0, launched.output
    launched.check_sound(steps=STEPS)
    return launched


def exported(launched: Launched, folder: Path) -> Path:
    done = penstock(launched.runs, "export", "r1", "-o", str(folder))
    assert done.returncode == 0, done.stderr
    return folder


@torch.no_grad()
def difference(folder: Path, architecture: str) -> float:
    """Return the largest difference between transformers' logits and ours."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert type(model).__name__ == architecture
    policy = load_checkpoint(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder).encode(
        "    def f(a):\n        return a"
    )
    ours = policy.logits(policy(torch.tensor(ids), [len(ids)]).hidden)
    return float((model(torch.tensor([ids])).logits[0] - ours).abs().max())


def test_a_sparse_model_goes_in_and_comes_out(tmp_path):
    model = tmp_path / "model"
    write_model(model)
    before = load_checkpoint(model)
    # Random weights solve nothing, so there is no advantage: decay alone changes them.
    launched = run_from(tmp_path, model, optimizer={"weight_decay": 200.0})
    started = penstock(launched.runs, "log", "cat", "r1", "--type", "RunStarted")
    digests = json.loads(started.stdout)["model_digests"]
    assert {path.name for path in model.glob("*.safetensors")} <= digests.keys()
    out = exported(launched, tmp_path / "out")
    assert difference(out, "Qwen3MoeForCausalLM") < 1e-4
    assert not torch.equal(load_checkpoint(out).embedding, before.embedding), "it was trained"
    assert (out / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()
    shutil.rmtree(model)
    replayed = penstock(launched.runs, "replay", "r1", "--json")
    assert json.loads(replayed.stdout)["identical"] is True, replayed.stdout + replayed.stderr


def test_a_dense_model_is_tuned_on_text_and_traces_before_rl(tmp_path):
    model = tmp_path / "model"
    write_model(model, dense=True)
    traces = tmp_path / "traces.jsonl"
    traces.write_text(f"{json.dumps(TRACE)}\n" * 4)
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("a.py", "b.py"):
        shutil.copy(__file__, texts / name)
    midtrain = {
        "num_tokens": 30_000,
        "sequence_tokens": 3072,
        "batch_tokens": 6144,
        "pass_tokens": 3072,
        "report_steps": 1,
    }
    corpora = [{"path": str(traces), "kind": "messages"}, {"path": str(texts)}]
    launched = run_from(tmp_path, model, model={"corpora": corpora}, midtrain=midtrain)
    assert launched.summary["midtrain"]["tokens"] >= 30_000
    assert launched.summary["midtrain"]["loss_last"] < launched.summary["midtrain"]["loss_first"]
    out = exported(launched, tmp_path / "out")
    assert difference(out, "Qwen3ForCausalLM") < 1e-4
    again = tmp_path / "again"
    again.mkdir()
    run_from(again, out)
