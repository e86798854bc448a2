"""`penstock erase --retrain`: the newest version without anyone who was erased, as a folder."""

import asyncio
from pathlib import Path

from penstock.actors.policy.checkpoint import as_numpy, publishable_state
from penstock.actors.policy.hf.config import config_json
from penstock.actors.trainer.counterfactual.retraining import Retrained, retrain
from penstock.actors.trainer.replay import REPLAY_TYPES, ReplayLog
from penstock.infra.export.folder import check_target, write_model
from penstock.infra.export.tokenizer_files import tokenizer_files
from penstock.infra.privacy.lineage import read
from penstock.infra.run.config_file import load_config
from penstock.infra.run.runs import RunDir
from penstock.infra.run.vault import open_vault
from penstock.messages.bus import Bus
from penstock.messages.reading.trajectories import last_of


async def retrain_run(run: RunDir, bus: Bus, folder: Path) -> Retrained | None:
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
