"""vLLM loads what `penstock export` writes, and computes what Penstock's own engine does."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tests.unit.models.test_models_export import DENSE, SPARSE, export, publish

from penstock.actors.generator.core import EngineCore
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.requests import GenerationRequest
from penstock.actors.policy.checkpoint import load_checkpoint
from penstock.infra.commands.doctor import VLLM_PYTHON
from penstock.messages.task import Sampling

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / VLLM_PYTHON
NUM_TOKENS = 24
SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {VLLM_PYTHON}: run `make vllm-env`"),
]


def greedy_of_vllm(folder, prompts):
    request = {
        "prompts": [prompt.tolist() for prompt in prompts],
        "messages": [{"role": "user", "content": "def f(x):\n    return x"}],
        "num_tokens": NUM_TOKENS,
    }
    command = [PYTHON, Path(__file__).with_name("vllm_greedy.py"), folder]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], **SETTINGS}
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, env=environment,
        timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def greedy_of_ours(policy, prompts):
    core = EngineCore(policy.config, EngineOptions(num_tokens_max=256))
    core.swap_model(core.decoder.prepare(policy.requires_grad_(False)), 0)
    sampling = Sampling(temperature=0.0, num_tokens_max=NUM_TOKENS)
    chunks = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        core.add(GenerationRequest(prompt, sampling, str(index), "", 0))
    while core.waiting or core.num_running:
        for request, chunk in core.step():
            chunks[request.request_id].append(chunk)
    return [
        (
            np.concatenate([chunk.token_ids for chunk in each]),
            np.concatenate([chunk.behavior_logprobs for chunk in each]),
        )
        for each in chunks.values()
    ]


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [SPARSE, DENSE], ids=["sparse", "dense"])
def test_greedy_tokens_and_logprobs_are_equal(config, tmp_path):
    folder = tmp_path / "runs" / "r1"
    folder.mkdir(parents=True)
    config = msgspec.structs.replace(config, hidden_size=64, head_dim=32)
    tokenizer = asyncio.run(publish(folder, config, 2, noise=0.3))
    assert export(folder, "-o", str(tmp_path / "out")) == 0
    rng = np.random.default_rng(0)
    prompts = [rng.integers(40, 250, length) for length in (5, 30, 64, 130)]
    theirs = greedy_of_vllm(tmp_path / "out", prompts)
    ours = greedy_of_ours(load_checkpoint(tmp_path / "out"), prompts)
    for reply, (token_ids, logprobs) in zip(theirs["replies"], ours, strict=True):
        assert len(set(reply["token_ids"])) > 3, "a reply that can differ"
        assert reply["token_ids"] == token_ids.tolist()
        torch.testing.assert_close(
            torch.tensor(reply["logprobs"]), torch.from_numpy(logprobs), atol=1e-3, rtol=0
        )
    told = [tokenizer.special_id("<|user|>"), *tokenizer.encode("def f(x):\n    return x")]
    told += [tokenizer.end_id, tokenizer.special_id("<|assistant|>")]
    assert theirs["chat_ids"] == told
