"""The torch engine and training against plain `transformers`, in one run on the same checkpoint.

Both sides alternate and medians are compared, so that what else the machine does hits both alike.
Generation: 128 prompt tokens and 128 sampled ones per request, temperature 1; the engine returns
logprobs and routes too, `generate` is not asked for them. Training: forward and backward of the
next-token loss over 16 sequences of 256 tokens.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.lab.bench.engine_vllm import measure_vllm
from tests.lab.bench.generation import (
    BATCHES,
    NEW_TOKENS,
    NUM_ROUNDS,
    draw_prompts,
    load_engine,
    time_engine,
)

from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import save_checkpoint
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.messages.errors import NotFoundError

_TRAIN_ROWS, _TRAIN_TOKENS = 16, 256

QUICKSTART = PolicyConfig(mtp_num_heads=0)
LARGER = PolicyConfig(
    hidden_size=256,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    moe_intermediate_size=256,
    mtp_num_heads=0,
)


async def run(_arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    """Measure generation and training for two models, on one thread and on all cores.

    Returns:
        By case, e.g. `1.9M/2 threads`: `step` (native or torch), `generate` by batch size and
        `train`, each with `tokens_per_s`, `transformers_tokens_per_s` and `ratio`; `pause_ms` of
        a full weight update under load; `vllm_tokens_per_s` by batch size, on the same prompts,
        where vLLM's environment exists.

    Raises:
        NotFoundError: transformers is not installed.

    """
    cores = os.cpu_count() or 1
    cases = [("1.9M", QUICKSTART, 1), ("1.9M", QUICKSTART, cores), ("10.8M", LARGER, cores)]
    before = torch.get_num_threads()
    try:
        return {
            f"{name}/{threads} threads": await _measure(config, threads)
            for name, config, threads in dict.fromkeys(cases)
        }
    finally:
        torch.set_num_threads(before)


async def _measure(config: PolicyConfig, num_threads: int) -> dict[str, object]:
    torch.set_num_threads(num_threads)
    policy = Policy(config, seed=0)
    theirs = _transformers_model(policy)
    engine = TorchEngine(config, EngineOptions(num_threads=num_threads))
    engine.start()
    try:
        pause_ms = await load_engine(engine, policy, 0)
        generate: dict[str, object] = {}
        for batch in BATCHES:
            prompts = draw_prompts(config, batch)
            ours_s: list[float] = []
            theirs_s: list[float] = []
            for round_ in range(NUM_ROUNDS):
                ours_s.append(await time_engine(engine, prompts, round_))
                theirs_s.append(_time(lambda p=prompts: _generate(theirs, p)))
            generate[str(batch)] = _compare(batch * NEW_TOKENS, ours_s, theirs_s)
        load = asyncio.create_task(time_engine(engine, draw_prompts(config, 16), NUM_ROUNDS))
        await asyncio.sleep(0)
        pause_ms = max(pause_ms, await load_engine(engine, policy, 1))
        await load
    finally:
        await engine.stop()
    return {
        "step": engine.capabilities().name,
        "generate": generate,
        "train": _measure_training(policy, theirs),
        "pause_ms": pause_ms,
        "vllm_tokens_per_s": measure_vllm(config, num_threads),
    }


def _transformers_model(policy: Policy) -> Any:
    try:
        from transformers import AutoModelForCausalLM, logging
    except ImportError as error:
        raise NotFoundError(
            "`python -m tests.lab engine` compares with transformers: pip install -e '.[dev]'"
        ) from error
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        save_checkpoint(policy, Path(folder))
        model: Any = AutoModelForCausalLM
        return model.from_pretrained(folder)


def _generate(model: Any, prompts: np.ndarray) -> None:
    ids = torch.as_tensor(prompts)
    with torch.inference_mode():
        model.eval().generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )


def _measure_training(policy: Policy, theirs: Any) -> dict[str, float]:
    ids = torch.as_tensor(
        np.random.default_rng(1).integers(0, policy.config.vocab_size, (_TRAIN_ROWS, _TRAIN_TOKENS))
    )

    def ours() -> None:
        output = policy(ids.reshape(-1), [_TRAIN_TOKENS] * _TRAIN_ROWS)
        hidden = output.hidden.unflatten(0, ids.shape)[:, :-1].flatten(0, 1)
        loss = -token_logprobs(policy.logits(hidden), ids[:, 1:].reshape(-1)).mean()
        torch.autograd.backward(loss)
        policy.zero_grad(set_to_none=True)

    def plain() -> None:
        theirs.train()(ids, labels=ids).loss.backward()
        theirs.zero_grad(set_to_none=True)

    ours()
    plain()
    times = [(_time(ours), _time(plain)) for _ in range(NUM_ROUNDS)]
    return _compare(ids.numel(), [time_[0] for time_ in times], [time_[1] for time_ in times])


def _time(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _compare(num_tokens: int, ours_s: list[float], theirs_s: list[float]) -> dict[str, float]:
    ours, theirs = (num_tokens / statistics.median(times) for times in (ours_s, theirs_s))
    return {
        "tokens_per_s": round(ours, 1),
        "transformers_tokens_per_s": round(theirs, 1),
        "ratio": round(ours / theirs, 2),
    }
