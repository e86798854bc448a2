"""Steps on several processes: the scenarios, and what runs in a process of them."""

import contextlib
import multiprocessing
import os
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.batching.manifests import trained_samples
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner, published
from penstock.actors.trainer.preferences.examples import PreferenceExample
from penstock.actors.trainer.ranks.learner import RankedLearner
from penstock.actors.trainer.ranks.plan import read_samples
from penstock.actors.trainer.ranks.world import RankEnvironment, World
from penstock.actors.trainer.step import StepResult, train_step
from penstock.messages.rollout import Turn
from penstock.messages.training import BatchManifest

SEED = 3
DIED = "died"
_WAIT_S = 240


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Some steps, as every process takes them."""

    policy: PolicyConfig
    config: TrainerConfig
    manifests: Sequence[BatchManifest]
    turns: Mapping[str, Sequence[Turn]]
    examples: Sequence[PreferenceExample] = field(default_factory=list)

    def take(self, learner: Learner, world: World | None = None) -> list[StepResult]:
        """Take them, compared with the learner's first weights; a rank has its own turns alone."""
        learner.versions.reference = published(learner.parameters)
        return [
            train_step(
                learner,
                manifest,
                self.read(manifest, world, learner.versions.recent),
                self.config,
                self.examples,
            )
            for manifest in self.manifests
        ]

    def read(
        self, manifest: BatchManifest, world: World | None, versions: Iterable[int] = ()
    ) -> dict[str, Sequence[Turn]]:
        """Return the turns that a process reads."""
        samples = trained_samples(manifest)
        if world is not None:
            at = world.rank, world.num_ranks
            samples = read_samples(
                samples,
                versions,
                (self.config.micro_batch_tokens, self.config.micro_batch_pairs),
                *at,
            )
        return {sample.rollout_id: self.turns[sample.rollout_id] for sample in samples}

    def local(self) -> Learner:
        """Return the learner of one process, on the device of the settings."""
        return Learner.initialized(self.policy, self.config.optimizer, SEED)

    def ranked(self, world: World) -> RankedLearner:
        """Return the learner of a rank."""
        return RankedLearner.of_world(self.policy, self.config.optimizer, SEED, world)


def on_ranks(
    num_ranks: int, task: Callable[..., Any], *arguments: Any, device: str = "cpu"
) -> list[Any]:
    """Return what a task gives on each rank; it is called with the world and the arguments.

    Of a rank that dies meanwhile it is `DIED`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])  # Which the meta device imports.
    port = _free_port()
    pipes, processes = [], []
    for rank in range(num_ranks):
        mine, theirs = context.Pipe(duplex=False)
        values = (rank, num_ranks, port, device, theirs, task, arguments)
        process = context.Process(target=_run, args=values, daemon=True)
        process.start()
        theirs.close()
        pipes.append(mine)
        processes.append(process)
    try:
        found = [_received(pipe) for pipe in pipes if pipe.poll(_WAIT_S)]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()
    assert len(found) == num_ranks, "a rank did not answer in time"
    return found


def _free_port() -> int:
    """Return a free port below those that systems hand out: no other test may get it meanwhile."""
    for port in random.sample(range(20_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no free port")


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return DIED


def _run(
    rank: int,
    num_ranks: int,
    port: int,
    device: str,
    answers: Connection,
    task: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "PENSTOCK_RANKS_SECRET": "s" * 32,
        "MASTER_PORT": str(port),
    }
    torch.set_num_threads(1)
    world = World(RankEnvironment.of(os.environ), device, timeout_s=_WAIT_S)
    answers.send(task(world, *arguments))
    world.close()
    os._exit(0)
