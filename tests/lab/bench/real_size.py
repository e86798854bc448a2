"""Real size: training and decoding with the project's engines against what a user writes.

Training: plain transformers (a loop of a few lines, with `torch.compile` as well on a GPU) and the
ranks' learner, on the same tokens of the same model, alternating. Decoding: `generate` of
transformers, the built-in engine (on a CPU), and vLLM through the project's engine where it is
installed. Medians of rounds after one for warming up; `--tiny` is for tests.
"""

import argparse
import asyncio
import importlib.metadata
import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.utils.checkpoint
import transformers
from tests.lab.bench.generation import load_engine

from penstock.actors.generator.engine import Engine
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import load_checkpoint
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.trainer.config import OptimizerConfig, TrainerConfig
from penstock.actors.trainer.engines.config import RanksConfig
from penstock.actors.trainer.ranks.hf.learner import load_learner
from penstock.actors.trainer.ranks.world import World
from penstock.actors.trainer.step import train_step
from penstock.kernels.arrays import to_array
from penstock.messages.reward import Outcome
from penstock.messages.rollout import StopReason, Turn, VersionSpan
from penstock.messages.task import Sampling
from penstock.messages.training import BatchManifest, GroupEntry, SampleEntry


class Size(NamedTuple):
    """What is measured."""

    shape: dict[str, Any]
    batches: list[tuple[int, int]]
    """Training: sequences and their tokens."""
    decoding: list[int]
    """Requests at once."""
    num_prompt: int
    num_new: int


QWEN3_06B = {
    "vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True,
}  # fmt: skip
TINY = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
SIZES = {
    False: Size(QWEN3_06B, [(4, 4096), (1, 16_384), (1, 32_768)], [1, 16, 64, 256], 512, 128),
    True: Size(TINY, [(4, 64), (1, 128)], [1, 4], 16, 16),
}
_PROMPT = 32
"""Tokens of each sequence that are context."""
_REQUEST_S = 600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--tiny", action="store_true", help="a tiny model, in seconds on a CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default: 3)")


async def run(arguments: argparse.Namespace) -> dict[str, object]:
    """Measure; return tokens per second and ratios by batch, with versions and the device."""
    size, device = SIZES[arguments.tiny], arguments.device
    if device == "cuda" and not torch.cuda.is_available():
        device_name = "none"
        raise SystemExit(f"real-size: expected a CUDA device, found {device_name}; --device cpu")
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = transformers.Qwen3Config(**size.shape)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
        training = _training(folder, size, device, arguments.rounds)
        decoding = await _decoding(folder, size, device, arguments.rounds)
    is_gpu = device == "cuda"
    return {
        "device": torch.cuda.get_device_name() if is_gpu else "cpu",
        "versions": _versions(),
        "parameters": sum(each.numel() for each in model.parameters()),
        "rounds": arguments.rounds,
        "training": training,
        "decoding": decoding,
    }


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("torch", "transformers", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


class PlainTraining:
    """The loop that a user writes: autocast, all logits by chunks of rows, AdamW."""

    def __init__(self, folder: Path, device: str, *, compiles: bool) -> None:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        )
        self.model: Any = model.to(device).train()
        self.run = torch.compile(self.model.model) if compiles else self.model.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=device != "cpu")
        self.device = device

    def step(self, ids: np.ndarray) -> None:
        """Take one optimizer step on [B, T] ids."""
        tokens = torch.from_numpy(ids).to(self.device)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device != "cpu"):
            hidden = self.run(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
            states = hidden[:, _PROMPT - 1 :].flatten(0, 1)
            targets = tokens[:, _PROMPT:].flatten()
            total = torch.zeros((), device=self.device)
            for rows, wanted in zip(states.split(2048), targets.split(2048), strict=True):
                total = total + torch.utils.checkpoint.checkpoint(
                    self._loss, rows, wanted, use_reentrant=False
                )
        (total / len(targets)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, rows: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = self.model.lm_head(rows).float()
        return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")


class RanksTraining:
    """The ranks' learner alone on the device."""

    def __init__(self, folder: Path, device: str, num_tokens: int) -> None:
        self.settings = TrainerConfig(
            micro_batch_tokens=num_tokens,
            device=device,
            optimizer=OptimizerConfig(learning_rate=1e-5),
            ranks=RanksConfig(num_ranks=1, model="transformers"),
        )
        shape = read_hf_config(folder)
        self.learner = load_learner(folder, shape, self.settings, World.alone(device))
        # Digests of all weights are the log's, not the step's.
        self.learner.weights_digest = self.learner.optimizer_digest = lambda: ""
        self.num_steps = 0

    def step(self, ids: np.ndarray) -> None:
        """Take one optimizer step on [B, T] ids."""
        self.num_steps += 1
        turns = {f"r{index}": [_turn(row)] for index, row in enumerate(ids)}
        train_step(self.learner, _manifest(turns, self.num_steps), turns, self.settings)


def _turn(row: np.ndarray) -> Turn:
    count = len(row) - _PROMPT
    return Turn(
        context_ids=to_array(row[:_PROMPT].astype(np.int32)),
        token_ids=to_array(row[_PROMPT:].astype(np.int32)),
        behavior_logprobs=to_array(np.full(count, -9.7, np.float32)),
        version_spans=[VersionSpan(policy_version=0, num_tokens=count)],
        stop_reason=StopReason.LENGTH,
        sampling=Sampling(temperature=1.0, num_tokens_max=count, seed=0),
    )


def _manifest(turns: dict[str, list[Turn]], step: int) -> BatchManifest:
    samples = [
        SampleEntry(
            rollout_id=name,
            outcome=Outcome.SOLVED,
            reward=1.0,
            advantage=1.0 if index % 2 else -0.5,
            version_spans=turn.version_spans,
        )
        for index, (name, (turn,)) in enumerate(turns.items())
    ]
    group = GroupEntry(group_id="g0", group_index=0, task_id="t", samples=samples)
    return BatchManifest(step=step, policy_version=step - 1, groups=[group])


def _training(folder: Path, size: Size, device: str, rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    rng = np.random.default_rng(0)
    for num_sequences, length in size.batches:
        num_tokens = num_sequences * length
        makes: dict[str, Callable[[], Any]] = {
            "plain": lambda: PlainTraining(folder, device, compiles=False),
            "ranks": lambda count=num_tokens: RanksTraining(folder, device, count),
        }
        if device == "cuda":
            makes["plain_compiled"] = lambda: PlainTraining(folder, device, compiles=True)
        shape = (rounds + 1, num_sequences, length)
        batches = rng.integers(0, size.shape["vocab_size"], shape)
        results[f"{num_sequences}x{length}"] = _train_in_turns(makes, batches, device)
    return results


def _train_in_turns(
    makes: dict[str, Callable[[], Any]], batches: np.ndarray, device: str
) -> dict[str, Any]:
    """Return tokens per second and peak memory of each, of those that fit in memory together."""
    times: dict[str, list[float]] = {name: [] for name in makes}
    found: dict[str, Any] = {}
    trained = {name: make() for name, make in makes.items()}
    for index, ids in enumerate(batches):
        for name in list(trained)[:: 1 if index % 2 else -1]:
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                times[name].append(
                    _seconds(lambda one=trained[name], ids=ids: one.step(ids), device)
                )
            except torch.cuda.OutOfMemoryError:
                del trained[name]
                found[name] = "out of memory"
    for name in trained:
        seconds = statistics.median(times[name][1:])
        found[f"{name}_tokens_s"] = batches[0].size / seconds
    for name in set(trained) - {"ranks"}:
        if "ranks" in trained:
            found[f"ranks_over_{name}"] = found["ranks_tokens_s"] / found[f"{name}_tokens_s"]
    return found


def _seconds(work: Callable[[], object], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


async def _decoding(folder: Path, size: Size, device: str, rounds: int) -> dict[str, Any]:
    policy_config = read_hf_config(folder)
    engines = await _engines(folder, policy_config, size, device)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32 if device == "cpu" else torch.bfloat16
    )
    model = model.to(device).eval()
    results: dict[str, Any] = {}
    for batch in size.decoding:
        prompts = np.random.default_rng(batch).integers(
            1, size.shape["vocab_size"], (batch, size.num_prompt)
        )
        times: dict[str, list[float]] = {name: [] for name in ("transformers", *engines)}
        for round_ in range(rounds + 1):
            ids = torch.from_numpy(prompts).to(device)
            times["transformers"].append(
                _seconds(lambda ids=ids: _generate(model, ids, size.num_new), device)
            )
            for name, engine in engines.items():
                times[name].append(await _sample(engine, prompts, size.num_new, round_))
        results[str(batch)] = {
            f"{name}_tokens_s": batch * size.num_new / statistics.median(each[1:])
            for name, each in times.items()
        }
    for engine in engines.values():
        await engine.stop()
    return results


class MeasuredEngine(Engine, Protocol):
    """An engine that was started here, and is stopped here."""

    async def stop(self) -> None:
        """End its thread or process."""
        ...


async def _engines(
    folder: Path, config: PolicyConfig, size: Size, device: str
) -> dict[str, MeasuredEngine]:
    """Return the project's engines that can run here, with the folder's weights."""
    engines: dict[str, MeasuredEngine] = {}
    num_tokens, num_running = size.num_prompt + size.num_new, max(size.decoding)
    if device == "cpu":
        options = EngineOptions(num_running_max=num_running, num_tokens_max=num_tokens)
        own = TorchEngine(config, options)
        own.start()
        engines["own"] = own
    if importlib.util.find_spec("vllm") is not None:
        engines["vllm"] = await _vllm(config, num_tokens, num_running, device)
    policy = load_checkpoint(folder).requires_grad_(False)
    for engine in engines.values():
        await load_engine(engine, policy, 0)
    return engines


async def _vllm(
    config: PolicyConfig, num_tokens: int, num_running: int, device: str
) -> MeasuredEngine:
    from penstock.actors.generator.vllm.engine import VllmEngine
    from penstock.actors.generator.vllm.options import VllmOptions
    from penstock.actors.policy.tokenizer import train_tokenizer

    options = VllmOptions(
        num_running_max=num_running,
        num_tokens_max=num_tokens,
        device=device,
        dtype="float32" if device == "cpu" else "bfloat16",
        gpu_memory_utilization=0.4,
    )
    engine = VllmEngine(config, options, train_tokenizer(["x"], 400), [0])
    await engine.start()
    return engine


@torch.inference_mode()
def _generate(model: Any, ids: torch.Tensor, count: int) -> None:
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        min_new_tokens=count,
        max_new_tokens=count,
        pad_token_id=0,
    )


async def _sample(engine: Engine, prompts: np.ndarray, count: int, round_: int) -> float:
    """Sample a turn of `count` tokens from every prompt at once; return the seconds it took."""
    await engine.reset_prefix_cache()

    async def one(index: int) -> None:
        sampling = Sampling(num_tokens_max=count, seed=1000 * round_ + index)
        name = f"{round_}.{index}"
        async for _ in engine.generate(prompts[index], sampling, request_id=name):
            pass

    started = time.perf_counter()
    async with asyncio.timeout(_REQUEST_S):
        await asyncio.gather(*(one(index) for index in range(len(prompts))))
    return time.perf_counter() - started
