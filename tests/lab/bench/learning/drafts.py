"""What drafts gain: a run's turns sampled again by its last weights, with and without them.

```
 run - the quickstart, some steps ─┬─ speed   tokens/s at each batch size, both engines in turn
                                   └─ bits    tokens, logprobs and routes of 10,000 turns
```
A batch of B is B episodes in progress, in the order of the run, so that attempts at one task come
together. Each round begins with an engine that has seen nothing.
"""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from tests.lab.bench.generation import load_engine
from tests.lab.bench.learning.asynchrony import CONFIG
from tests.lab.bench.learning.parts import Result, Unit
from tests.lab.bench.learning.recorded_turns import RecordedTurn, read_episodes
from tests.lab.bench.learning.whole_runs import complete_run, export_newest

from penstock.actors.generator.config import GeneratorConfig
from penstock.actors.generator.options import EngineOptions
from penstock.actors.generator.torch_engine import TorchEngine
from penstock.actors.policy.checkpoint import load_checkpoint
from penstock.actors.policy.model import Policy
from penstock.infra.run.runs import RunDir

BATCHES = (1, 8, 16, 32)
NUM_ROUNDS = 5
NUM_STEPS = 12
NUM_TURNS = 10_000
NUM_DRAFTS = GeneratorConfig().num_drafts_max
_TURNS_PER_ROUND = {1: 300, 8: 600, 16: 900, 32: 900}
_ROUND_S_MAX = 600.0

Episode = Sequence[RecordedTurn]
Sampled = dict[str, tuple[bytes, bytes, bytes]]
"""Request id -> bytes of its tokens, logprobs and routes."""


def units() -> list[Unit]:
    """Return the three units."""
    return [Unit("run", _run), Unit("speed", _speed), Unit("bits", _bits)]


def _run(folder: Path) -> Result:
    """Run some steps of the quickstart, and keep the last weights."""
    settings: dict[str, object] = {
        "trainer.steps_max": NUM_STEPS,
        "evaluator.eval_every_steps": 0,
        "evaluator.num_eval_tasks": 16,
        "evaluator.sets": [],
        "users.num_requests": 0,
    }
    run = complete_run(folder / "runs", "run", CONFIG, settings, with_replay=False)
    export_newest(run, folder / "models" / "run")
    episodes = read_episodes(run)
    return {"num_episodes": len(episodes), "num_turns": sum(map(len, episodes))}


def _opened(folder: Path) -> tuple[Policy, list[Episode]]:
    torch.set_num_threads(1)
    policy = load_checkpoint(folder / "models" / "run").requires_grad_(False)
    return policy, list(read_episodes(RunDir(folder / "runs" / "run")))


def _speed(folder: Path) -> Result:
    """Measure both at each batch size, alternating."""
    policy, episodes = _opened(folder)
    figures: Result = {}
    for batch in BATCHES:
        chosen = _first(episodes, _TURNS_PER_ROUND[batch])
        rounds: dict[int, list[Result]] = {0: [], NUM_DRAFTS: []}
        for _ in range(NUM_ROUNDS):
            for num_drafts, results in rounds.items():
                results.append(asyncio.run(_timed(policy, chosen, batch, num_drafts)))
        figures[str(batch)] = {"plain": rounds[0], "drafts": rounds[NUM_DRAFTS]}
    return figures


def _first(episodes: Sequence[Episode], num_turns: int) -> list[Episode]:
    """Return the last episodes of a run that have so many turns: those of the newest policy."""
    chosen: list[Episode] = []
    for episode in reversed(episodes):
        if sum(map(len, chosen)) >= num_turns:
            break
        chosen.append(episode)
    return chosen[::-1]


async def _timed(
    policy: Policy, episodes: Sequence[Episode], batch: int, num_drafts: int
) -> Result:
    engine = await _start(policy, num_drafts)
    try:
        wall, processor = time.perf_counter(), time.process_time()
        await _sample(engine, episodes, batch)
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        metrics = engine.metrics()
    finally:
        await engine.stop()
    tokens = metrics.num_generated_tokens
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / wall,
        "tokens_per_processor_s": tokens / processor,
        "drafted": metrics.num_drafted_tokens,
        "accepted": metrics.num_accepted_tokens,
    }


async def _start(policy: Policy, num_drafts: int) -> TorchEngine:
    settings = GeneratorConfig()
    options = EngineOptions(
        num_running_max=settings.num_running_max,
        num_tokens_max=settings.num_tokens_max,
        num_drafts_max=num_drafts,
    )
    engine = TorchEngine(policy.config, options)
    engine.start()
    await load_engine(engine, policy, 0)
    return engine


async def _sample(
    engine: TorchEngine, episodes: Sequence[Episode], batch: int, seed: int = 0
) -> Sampled:
    """Sample every turn again, `batch` episodes at a time."""
    sampled: Sampled = {}
    waiting = iter(enumerate(episodes))

    async def play() -> None:
        # Each player takes the next episode where it has finished one.
        for number, episode in waiting:
            for index, turn in enumerate(episode):
                name = f"{number}.{index}"
                sampling = msgspec.structs.replace(turn.sampling, seed=turn.sampling.seed + seed)
                chunks = [
                    chunk
                    async for chunk in engine.generate(
                        turn.context, sampling, request_id=name, session_id=str(number)
                    )
                ]
                ids = np.concatenate([chunk.token_ids for chunk in chunks])
                logprobs = np.concatenate([chunk.behavior_logprobs for chunk in chunks])
                routes = chunks[-1].routed_experts
                assert routes is not None
                sampled[name] = ids.tobytes(), logprobs.tobytes(), routes.tobytes()

    async with asyncio.timeout(_ROUND_S_MAX):
        await asyncio.gather(*(play() for _ in range(batch)))
    return sampled


def _bits(folder: Path) -> Result:
    """Compare what both sample, at a batch of 16."""
    policy, episodes = _opened(folder)
    num_turns = num_different = num_tokens = 0
    for seed in range(1 + NUM_TURNS // sum(map(len, episodes))):
        plain, drafted = (
            asyncio.run(_sampled(policy, episodes, num_drafts, seed))
            for num_drafts in (0, NUM_DRAFTS)
        )
        num_turns += len(plain)
        num_tokens += sum(len(ids) for ids, _, _ in plain.values()) // np.dtype(np.int32).itemsize
        num_different += sum(drafted[name] != found for name, found in plain.items())
    return {"turns": num_turns, "tokens": num_tokens, "different": num_different}


async def _sampled(
    policy: Policy, episodes: Sequence[Episode], num_drafts: int, seed: int
) -> Sampled:
    engine = await _start(policy, num_drafts)
    try:
        return await _sample(engine, episodes, BATCHES[2], seed)
    finally:
        await engine.stop()


def summarize(results: Mapping[str, Result]) -> Result:
    """Return medians by batch size, ratios, accepted lengths, and the turns that differed."""
    by_batch = {str(batch): _compared(results["speed"][str(batch)]) for batch in BATCHES}
    return {"batches": by_batch, "bits": results["bits"], "run": results["run"]}


def _compared(rounds: Mapping[str, Sequence[Result]]) -> Result:
    """Return the medians over the rounds of one batch size."""

    def median(kind: str, name: str) -> float:
        return statistics.median(one[name] for one in rounds[kind])

    names = ("tokens_per_s", "tokens_per_processor_s")
    drafted, accepted = median("drafts", "drafted"), median("drafts", "accepted")
    tokens = median("drafts", "tokens")
    return {
        **{f"{kind}_{name}": round(median(kind, name)) for kind in rounds for name in names},
        **{
            f"ratio_{name}": round(median("drafts", name) / median("plain", name), 3)
            for name in names
        },
        "tokens_per_step": round(tokens / (tokens - accepted), 3),
        "accepted_share": round(accepted / max(drafted, 1), 3),
    }
