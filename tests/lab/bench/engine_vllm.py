"""vLLM's part of `python -m tests.lab engine`, run by the Python of its own environment.

`python -m tests.lab.bench.engine_vllm POLICY THREADS` prints tokens per second by batch size.
"""

import asyncio
import json
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
from tests.lab.bench.generation import (
    BATCHES,
    NEW_TOKENS,
    NUM_ROUNDS,
    draw_prompts,
    load_engine,
    time_engine,
)

from penstock.actors.generator.vllm.engine import VllmEngine
from penstock.actors.generator.vllm.options import VllmOptions
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.infra.models.environment import VLLM_ENVIRONMENTS
from penstock.messages.reading.parsing import parse_json

_MEASURE_S = 900.0


def measure_vllm(config: PolicyConfig, num_threads: int) -> dict[str, float] | None:
    """Return tokens per second by batch size, or None where vLLM's environment does not exist.

    Raises:
        RuntimeError: vLLM failed; the text has the end of what it printed.

    """
    python = Path(VLLM_ENVIRONMENTS["cpu"]) / "bin/python"
    if not python.exists():
        return None
    command = [str(python), "-m", __name__, msgspec.json.encode(config).decode(), str(num_threads)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MEASURE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"vLLM: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


async def _measure(config: PolicyConfig, num_threads: int) -> dict[str, float]:
    tokenizer = train_tokenizer(["no grammar is asked for"], config.vocab_size)
    engine = VllmEngine(config, VllmOptions(num_threads=num_threads), tokenizer, [0])
    await engine.start()
    speeds: dict[str, float] = {}
    try:
        await load_engine(engine, Policy(config, seed=0), 0)
        for batch in BATCHES:
            prompts = draw_prompts(config, batch)
            times = [await time_engine(engine, prompts, round_) for round_ in range(NUM_ROUNDS)]
            speeds[str(batch)] = round(batch * NEW_TOKENS / statistics.median(times), 1)
    finally:
        await engine.stop()
    return speeds


if __name__ == "__main__":
    policy = parse_json(sys.argv[1], PolicyConfig, "POLICY")
    print("\n" + json.dumps(asyncio.run(_measure(policy, int(sys.argv[2])))))
