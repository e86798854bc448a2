"""Erases a user's content after no step needs it any more, and retrains without erased users.

```
 ErasureRequested ─▶ join, trainer: stop using it ─▶ ErasurePrepared: a checkpoint is past it
                                                             ▼
                            UserErased ◀── the user's content key is deleted
```
The log does not change, but the user's content in it cannot be read any more.
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
    """Train a run again without erased users and write the model; None if they trained nothing.

    Raises:
        ConfigError: The folder is not empty.
        NotFoundError: The run has no checkpoint from before.
        ErasedError: A trained turn cannot be read.

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
    await asyncio.to_thread(write_model, folder, text, tensors, tokenizer, config.policy.adapter)
    return retrained


PREPARED_S_MAX = 300.0
"""Maximum wait for the trainer, including a step in progress."""
REPORT_S_MAX = 5.0
"""Maximum age of a report of a running trainer, which reports every second."""


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """Result of an erasure."""

    tenant: str
    user: str
    key_id: str
    num_requests: int
    """Requests on record whose content is erased."""
    num_samples: int
    """Trained samples with such a request."""
    steps: list[int]
    """Steps that trained those samples; their versions and later ones keep what they learned."""


async def erase(bus: Bus, vault: Vault, tenant: str, user: str, *, is_up: bool) -> Erasure:
    """Delete a user's content key and record it in the log.

    Args:
        is_up: Whether actors of the run may be running.

    Raises:
        NotFoundError: Nothing of this user is stored.
        ConfigError: The run is down, and its newest checkpoint is older than the user's samples.
        DeadlineError: The trainer runs and did not prepare in time.

    """
    owner = owner_of(tenant, user)
    key_id = await vault.key_id(owner) or await _interrupted(bus, tenant, user)
    if not key_id:
        raise NotFoundError(f"--user: nothing of {owner} is stored, or it was erased before")
    request = ErasureRequested(tenant=tenant, user=user, key_id=key_id)
    # First, so that no new sample of the user is joined or trained from here on.
    await bus.publish([request])
    # Without a trainer nobody would answer, and its newest checkpoint decides alone.
    if is_up and await _has_trainer(bus):
        await _prepared(bus, request)
    lineage = await read(bus)
    samples = lineage.samples_of(tenant, user)
    steps = sorted({sample.step for sample in samples})
    await _check_checkpoint(bus, steps)
    # The key before the event: a crash in between leaves a request, which a retry completes.
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
    """Return the key of an erasure that was requested and not completed, or an empty string."""
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
    # A crash must not make the trainer repeat a step whose turns cannot be read any more.
    saved = await bus.last(CheckpointSaved)
    step = saved.event.step if saved is not None and isinstance(saved.event, CheckpointSaved) else 0
    if steps and steps[-1] > step:
        raise ConfigError(
            f"--user: step {steps[-1]} trained this user's samples, the newest checkpoint is of "
            f"step {step}: start the service and stop it in order, which saves one; then erase"
        )
