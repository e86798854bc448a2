"""What every engine is asked for in `python -m tests.lab engine`."""

import asyncio
import time

import numpy as np

from penstock.actors.generator.engine import Engine
from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.messages.task import Sampling

BATCHES = (1, 16, 64)
PROMPT_TOKENS, NEW_TOKENS = 128, 128
NUM_ROUNDS = 3
_REQUEST_S = 300.0


async def load_engine(engine: Engine, policy: Policy, policy_version: int) -> float:
    """Give the engine a full set of weights; returns the pause in milliseconds."""
    state = {name: as_numpy(tensor) for name, tensor in publishable_state(policy).items()}
    await engine.begin_update()
    await engine.apply(state)
    return await engine.commit(policy_version)


def draw_prompts(config: PolicyConfig, batch: int) -> np.ndarray:
    """Draw [batch, PROMPT_TOKENS] ids; no two prompts share a prefix."""
    ids = np.random.default_rng(0).integers(64, config.vocab_size, (batch, PROMPT_TOKENS))
    ids[:, 0] = np.arange(batch)
    return ids


async def time_engine(engine: Engine, prompts: np.ndarray, round_: int) -> float:
    """Sample a turn of NEW_TOKENS from every prompt at once; returns the seconds it took."""
    await engine.reset_prefix_cache()

    async def one(index: int) -> None:
        sampling = Sampling(num_tokens_max=NEW_TOKENS, seed=1000 * round_ + index)
        name = f"{round_}.{index}"
        async for _ in engine.generate(prompts[index], sampling, request_id=name):
            pass

    started = time.perf_counter()
    async with asyncio.timeout(_REQUEST_S):
        await asyncio.gather(*(one(index) for index in range(len(prompts))))
    return time.perf_counter() - started
