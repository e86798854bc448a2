"""Sample users of a run: custom code that sends requests to its gateway (`[users]`)."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock.envs.tasks.storage import load_hidden_tests, load_tasks
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.runs import RunDir
from penstock.messages.bus import Bus
from penstock.messages.reading.references import load_reference
from penstock.messages.task import HiddenTests, Split, Task
from penstock.messages.weights import WeightsApplied


@dataclass(frozen=True)
class UsersRequest:
    """Everything that custom code needs to act as users, once a model is served."""

    num_requests: int
    period_s: float
    """Pause between two requests."""
    seed: int
    harness: str
    """Version of the agents' tools."""
    model: str
    """Name of the model in requests."""
    key: str
    """API key of the gateway."""
    tasks: Sequence[Task]
    """Training tasks of the run."""
    hidden_tests: Mapping[str, HiddenTests]
    """Tests and solutions of these tasks by task id."""
    url_file: Path

    @property
    def url(self) -> str:
        """Present URL of the gateway, which may change when it restarts."""
        return self.url_file.read_text().strip()


async def run_users(run: RunDir, config: RunConfig, bus: Bus) -> None:
    """Call `users.run` once the model is served, unless `users.num_requests` is 0.

    Raises:
        ConfigError: The custom code does not exist.

    """
    section = config.users
    if section.num_requests == 0:
        return
    loaded = load_reference(section.run, "users.run")
    users = cast("Callable[[UsersRequest], Awaitable[None]]", loaded)
    # Before that, the gateway would refuse every request.
    await _until_served(bus, config)
    request = UsersRequest(
        num_requests=section.num_requests,
        period_s=section.period_s,
        seed=config.run.seed,
        harness=config.pacer.harness,
        model=config.gateway.model,
        key=run.gateway_key.read_text().strip(),
        tasks=await load_tasks(run.store(), Split.TRAIN),
        hidden_tests=await load_hidden_tests(run.store(), Split.TRAIN),
        url_file=run.gateway_url,
    )
    await users(request)


async def _until_served(bus: Bus, config: RunConfig) -> None:
    async with asyncio.timeout(config.run.wall_s_max):
        async for _ in bus.follow([WeightsApplied]):
            return
