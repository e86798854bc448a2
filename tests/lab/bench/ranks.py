"""Whether several trainer processes, started by torchrun, train to the bits of one.

Seconds are meaningful only where each rank has cores of its own.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec
import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import token_logprobs
from penstock.actors.trainer.config import OptimizerConfig
from penstock.actors.trainer.learner import Learner, Pass
from penstock.actors.trainer.ranks.learner import RankedLearner
from penstock.actors.trainer.ranks.world import SECRET, RankEnvironment, World
from penstock.messages.errors import PenstockError
from penstock.messages.reading.parsing import parse_json

_POLICY = PolicyConfig(mtp_num_heads=0)
_OPTIMIZER = OptimizerConfig()
_NUMBERS_OF_RANKS = (1, 2, 4)
_SEED = 0
_NUM_STEPS, _NUM_PASSES, _PASS_TOKENS = 4, 7, 256
_TIMEOUT_S = 300.0


class RanksFailedError(PenstockError, RuntimeError):
    """Processes that should have trained together ended with an error."""


class RankSteps(msgspec.Struct, frozen=True, kw_only=True):
    """What training gave."""

    weights_digest: str
    optimizer_digest: str
    norms: list[float]
    s_per_step: float


def run(_arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a policy in this process, then by 1, 2 and 4 ranks on this machine's cores.

    Returns:
        By number of ranks, 0 being the local engine: digests and the norm of each step's
        gradient, and `identical`, whether they are the local engine's; `s_per_step`.

    Raises:
        RanksFailedError: Ranks ended with an error.

    """
    expected = _steps(Learner.initialized(_POLICY, _OPTIMIZER, _SEED))
    results = {0: expected} | {number: _torchrun(number) for number in _NUMBERS_OF_RANKS}
    alike = ("weights_digest", "optimizer_digest", "norms")
    return {
        str(number): msgspec.structs.asdict(found)
        | {"identical": all(getattr(found, name) == getattr(expected, name) for name in alike)}
        for number, found in results.items()
    }


def _torchrun(num_ranks: int) -> RankSteps:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr=127.0.0.1"]
    command += [f"--nproc-per-node={num_ranks}", "-m", "tests.lab.bench.ranks"]
    environment = os.environ | {SECRET: secrets.token_hex(32)}
    found = subprocess.run(command, capture_output=True, timeout=_TIMEOUT_S, check=False, text=True,
                           env=environment)  # fmt: skip
    if found.returncode:
        raise RanksFailedError(f"{num_ranks} ranks: {found.stderr[-2000:]}")
    return parse_json(found.stdout.encode(), RankSteps, f"{num_ranks} ranks")


def _steps(learner: Learner) -> RankSteps:
    learner.set_threads(1)
    norms: list[float] = []
    started = time.perf_counter()
    for step in range(1, _NUM_STEPS + 1):
        with learner.published_weights():
            learner.accumulate(list(_passes(learner.policy, step)), num_workers=1, num_threads=1)
        norms.append(learner.apply(step, _OPTIMIZER, _NUM_STEPS))
    return RankSteps(
        s_per_step=(time.perf_counter() - started) / _NUM_STEPS,
        weights_digest=learner.weights_digest(),
        optimizer_digest=learner.optimizer_digest(),
        norms=norms,
    )


def _passes(policy: Policy, step: int) -> Iterator[Pass[None]]:
    generator = torch.Generator().manual_seed(step)
    for _ in range(_NUM_PASSES):
        ids = torch.randint(policy.config.vocab_size, (_PASS_TOKENS,), generator=generator)
        yield partial(_loss, policy, ids)


def _loss(policy: Policy, ids: torch.Tensor) -> tuple[torch.Tensor, None]:
    hidden = policy(ids[:-1], [_PASS_TOKENS - 1]).hidden
    return -token_logprobs(policy.logits(hidden), ids[1:]).mean() / _NUM_PASSES, None


def _rank() -> None:
    """Run as a rank of torchrun; rank 0 prints its result."""
    world = World(RankEnvironment.of(os.environ), "cpu", _TIMEOUT_S)
    found = _steps(RankedLearner.of_world(_POLICY, _OPTIMIZER, _SEED, world))
    if world.rank == 0:
        sys.stdout.write(msgspec.json.encode(found).decode())
        sys.stdout.flush()
    world.close()
    os._exit(0)


if __name__ == "__main__":
    _rank()
