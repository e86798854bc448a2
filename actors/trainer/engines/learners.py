"""The learner that a run's settings ask for: of the own policy, or of a model of transformers.

Models of transformers come from the folder in the run's store; theirs is the package of the extra
`ranks`, imported only where it is asked for.
"""

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.stored import fetch_model, stored_model
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.engines.protocol import Place
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.ranks.learner import RankedLearner
from penstock.actors.trainer.ranks.world import World
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import NotFoundError


def uses_transformers(config: TrainerConfig) -> bool:
    """Whether the ranks train a model of transformers."""
    return config.engine == "ranks" and config.ranks.model == "transformers"


async def open_learner(
    place: Place, policy_config: PolicyConfig, config: TrainerConfig, seed: int
) -> Learner:
    """Return a learner in this process alone: of random weights, or of the run's model.

    The model is that of transformers, or the base of adapters.

    Raises:
        NotFoundError: The store does not have the model.
        CorruptDataError: The store's model is damaged.

    """
    if not uses_transformers(config):
        learner = await place.offload(Learner.initialized, policy_config, config.optimizer, seed)
        if policy_config.adapter:
            async with model_folder(place.store) as folder:
                await place.offload(learner.load_model, folder)
        return learner
    return await open_ranked_learner(
        place, policy_config, config, await place.offload(World.alone, config.device), seed
    )


async def open_first_learner(
    place: Place,
    policy_config: PolicyConfig,
    config: TrainerConfig,
    seed: int,
    world: World | None = None,
) -> Learner:
    """Return the learner that version 0 begins with: of the run's model, if its store has one.

    Args:
        place: of the caller.
        policy_config: shape of the policy.
        config: of the trainer.
        seed: of random weights.
        world: ranks that hold a model of transformers together; None: it is whole in this process.

    Raises as `open_learner`, and ModelFormatError where the model does not fit the policy.

    """
    if world is not None:
        return await open_ranked_learner(place, policy_config, config, world, seed)
    learner = await open_learner(place, policy_config, config, seed)
    starts_whole = not uses_transformers(config) and not policy_config.adapter
    if starts_whole and await stored_model(place.store) is not None:
        async with model_folder(place.store) as folder:
            await place.offload(learner.load_model, folder)
    return learner


async def open_ranked_learner(
    place: Place, policy_config: PolicyConfig, config: TrainerConfig, world: World, seed: int = 0
) -> RankedLearner:
    """Return a rank's part of a learner, whose weights a checkpoint is to replace.

    Raises as `open_learner`.
    """
    if not uses_transformers(config):
        return await place.offload(
            RankedLearner.of_world, policy_config, config.optimizer, 0, world
        )
    from penstock.actors.trainer.ranks.hf.learner import load_learner

    async with model_folder(place.store) as folder:
        return await place.offload(load_learner, folder, policy_config, config, world, seed)


@asynccontextmanager
async def model_folder(store: ObjectStore) -> AsyncIterator[Path]:
    """Have the run's model as a folder inside the block.

    Raises:
        NotFoundError: The store has none.
        CorruptDataError: It is damaged.

    """
    stored = await stored_model(store)
    if stored is None:
        raise NotFoundError("model/: the store has no model; expected that of model.checkpoint")
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as name:
        await fetch_model(store, stored, Path(name))
        yield Path(name)
