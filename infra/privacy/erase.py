"""Erases a user's content in order: no step that may still have to be taken needs it any more.

```
 ErasureRequested ─▶ join, trainer: use it no more ─▶ ErasurePrepared: a checkpoint is past it
                                                             ▼
                            UserErased ◀── the user's content key is deleted
```
The log stays as it is: what it holds of the user cannot be read any more.

`penstock erase --retrain`: the newest version without anyone who was erased, as a folder.
"""

import asyncio
import time
from pathlib import Path

import msgspec

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.hf.config import config_json
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.counterfactual.retraining import RetrainingReport, retrain
from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog
from penstock.infra.config.file import load_config
from penstock.infra.export.folder import check_target, write_model
from penstock.infra.export.tokenizer_files import tokenizer_files
from penstock.infra.privacy.lineage import read
from penstock.infra.run.runs import RunDir, open_vault
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError, DeadlineError, NotFoundError
from penstock.messages.feedback import ErasurePrepared, ErasureRequested, UserErased, owner_of
from penstock.messages.reading.trajectories import last_of
from penstock.messages.telemetry import ActorReported
from penstock.messages.training import CheckpointSaved


async def retrain_run(run: RunDir, bus: Bus, folder: Path) -> RetrainingReport | None:
    """Train a run again without erased users, and write the model; None: they trained nothing.

    Args:
        run: the run; its log and store stay as they are.
        bus: its log.
        folder: new or empty.

    Raises:
        ConfigError: The folder is not empty.
        NotFoundError: The run keeps no checkpoint from before.
        ErasedError: A turn that was trained cannot be read.

    """
    check_target(folder)
    left_out = (await read(bus)).trained_of_erased()
    if not left_out:
        return None
    config, store = load_config(run.config), run.store()
    log = ReplayLog(
        deliveries=bus.follow(REPLAY_TYPES, stop_at_end=True),
        last=last_of(bus),
        store=store,
        opener=open_vault(run),
    )
    learner, retrained = await retrain(log, config.policy, config.trainer, left_out)
    tensors = {name: as_numpy(tensor) for name, tensor in publishable_state(learner.policy).items()}
    tokenizer = await tokenizer_files(store, config.policy.max_position_embeddings)
    text = config_json(config.policy, **tokenizer.special_ids)
    await asyncio.to_thread(write_model, folder, text, tensors, tokenizer)
    return retrained


PREPARED_S_MAX = 300.0
"""Longest wait for the trainer, a step in progress included."""
REPORT_S_MAX = 5.0
"""A trainer that is up reports every second."""


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """What was erased."""

    tenant: str
    user: str
    key_id: str
    num_requests: int
    """Requests on record whose content is gone."""
    num_samples: int
    """Samples with one of them that were trained."""
    steps: list[int]
    """Steps that trained those: version s and all after it keep what they learned."""


async def erase(bus: Bus, vault: Vault, tenant: str, user: str, *, is_up: bool) -> Erasure:
    """Delete a user's content key, and say so in the log.

    Args:
        bus: the run's log.
        vault: the run's.
        tenant: whose user it is.
        user: pseudonym.
        is_up: whether actors of the run may be at work.

    Raises:
        NotFoundError: Nothing of this user is stored.
        ConfigError: The run is down, and its newest checkpoint is older than the user's samples.
        DeadlineError: The trainer is at work and did not prepare in time.

    """
    owner = owner_of(tenant, user)
    key_id = await vault.key_id(owner) or await _interrupted(bus, tenant, user)
    if not key_id:
        raise NotFoundError(f"--user: nothing of {owner} is stored, or it was erased before")
    request = ErasureRequested(tenant=tenant, user=user, key_id=key_id)
    await bus.publish([request])
    if is_up and await _has_trainer(bus):
        await _prepared(bus, request)
    lineage = await read(bus)
    samples = lineage.samples_of(tenant, user)
    steps = sorted({sample.step for sample in samples})
    await _check_checkpoint(bus, steps)
    await vault.erase(owner)
    step_last = steps[-1] if steps else 0
    await bus.publish([UserErased(tenant=tenant, user=user, key_id=key_id, step_last=step_last)])
    return Erasure(
        tenant=tenant,
        user=user,
        key_id=key_id,
        num_requests=len(lineage.requests_of(tenant, user)),
        num_samples=len(samples),
        steps=steps,
    )


async def _interrupted(bus: Bus, tenant: str, user: str) -> str:
    """Return the key of an erasure that was requested and never done; empty: none.

    Its command may have died between deleting the key and saying so.
    """
    requested: dict[str, str] = {}
    async for delivery in bus.follow([ErasureRequested, UserErased], stop_at_end=True):
        event = delivery.event
        assert isinstance(event, ErasureRequested | UserErased)
        if isinstance(event, UserErased):
            requested.pop(event.key(), None)
        elif (event.tenant, event.user) == (tenant, user):
            requested[event.key()] = event.key_id
    return next(iter(requested.values()), "")


async def _has_trainer(bus: Bus) -> bool:
    try:
        async with asyncio.timeout(REPORT_S_MAX):
            async for delivery in bus.follow([ActorReported]):
                event = delivery.event
                assert isinstance(event, ActorReported)
                if event.role == "trainer" and time.time() - event.at < REPORT_S_MAX:
                    return True
    except TimeoutError:
        pass
    return False


async def _prepared(bus: Bus, request: ErasureRequested) -> None:
    try:
        async with asyncio.timeout(PREPARED_S_MAX):
            async for delivery in bus.follow([ErasurePrepared]):
                if delivery.event.key() == request.key():
                    return
    except TimeoutError as error:
        text = f"the trainer did not prepare the erasure within {PREPARED_S_MAX:g} s; try again"
        raise DeadlineError(text) from error


async def _check_checkpoint(bus: Bus, steps: list[int]) -> None:
    """See that no step with the user's samples would have to be taken again after a crash."""
    saved = await bus.last(CheckpointSaved)
    step = saved.event.step if saved is not None and isinstance(saved.event, CheckpointSaved) else 0
    if steps and steps[-1] > step:
        raise ConfigError(
            f"--user: step {steps[-1]} trained this user's samples, the newest checkpoint is of "
            f"step {step}: start the service and stop it in order, which saves one; then erase"
        )
