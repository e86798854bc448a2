"""The policies and prompts on which mismatch is measured, loaded from a run."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.actors.policy.checkpoint import load_published, publishable_state
from penstock.actors.policy.model import Policy
from penstock.actors.trainer.checkpoint import (
    first_checkpoint,
    newest_checkpoint,
    read_policy_weights,
)
from penstock.infra.config.file import load_config
from penstock.infra.config.settings import RunConfig
from penstock.infra.run.runs import RunDir, open_log
from penstock.kernels.arrays import from_array
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import NotFoundError
from penstock.messages.reading.trajectories import last_of, read_turns
from penstock.messages.rollout import RolloutFinished

_NUM_PROMPTS = 64


@dataclass(frozen=True, kw_only=True)
class MismatchSubject:
    """Policies and prompts on which mismatch is measured."""

    source: str
    """Id of the run, or the configuration file."""
    old: Policy
    """Policy that samples first and is swapped out with requests in flight."""
    new: Policy
    prompts: Sequence[np.ndarray]
    temperature: float


async def load_subject(run: RunDir) -> MismatchSubject:
    """Load a run's first and newest checkpoint, and the prompts of its rollouts.

    Raises:
        NotFoundError: The run has no checkpoint or no rollout yet.

    """
    config = load_config(run.config)
    async with open_log(run, "mismatch") as bus:
        store = run.store()
        keys = [await first_checkpoint(store), await newest_checkpoint(store)]
        if None in keys:
            raise NotFoundError(f"run {run.run_id}: there is no checkpoint yet")
        old, new = [await _of_checkpoint(store, key, config) for key in keys if key]
        prompts = await _prompts(bus, store)
    if not prompts:
        raise NotFoundError(f"run {run.run_id}: its log has no rollout yet")
    temperature = config.pacer.temperature
    return MismatchSubject(
        source=run.run_id, old=old, new=new, prompts=prompts, temperature=temperature
    )


async def _of_checkpoint(store: ObjectStore, key: str, config: RunConfig) -> Policy:
    policy = Policy(config.policy)
    policy.load_state_dict(await read_policy_weights(store, key))
    # Generators never see the trainer's float32 weights.
    load_published(policy, publishable_state(policy))
    return policy


async def _prompts(bus: Bus, store: ObjectStore) -> list[np.ndarray]:
    prompts: list[np.ndarray] = []
    async for delivery in bus.follow((RolloutFinished,), stop_at_end=True):
        event = delivery.event
        if not isinstance(event, RolloutFinished) or not event.turns:
            continue
        context = np.zeros(0, np.int32)
        for turn in await read_turns(store, last_of(bus), event):
            past = context[: 0 if turn.starts_segment else None]
            context = np.concatenate([past, from_array(turn.context_ids)])
            prompts.append(context)
            context = np.concatenate([context, from_array(turn.token_ids)])
        if len(prompts) >= _NUM_PROMPTS:
            break
    return prompts[:_NUM_PROMPTS]
