"""Builds the trainer's engine, and a rank."""

import os
from collections.abc import AsyncIterator, Callable

from penstock.actors.relay.core.store_io import StoreIO
from penstock.actors.relay.publish.publisher import Publisher
from penstock.actors.relay.publish.rank_uploads import RankUploads
from penstock.actors.relay.publish.shard_uploader import HeldShardUploader
from penstock.actors.runtime.vault import Vault
from penstock.actors.trainer.engines.local import LocalEngine
from penstock.actors.trainer.engines.protocol import TrainingEngine
from penstock.actors.trainer.ranks.actor import TrainingRank
from penstock.actors.trainer.ranks.engine import RankedEngine
from penstock.actors.trainer.ranks.world import RankEnvironment
from penstock.infra.config.ranks_checks import check_environment
from penstock.infra.config.settings import RunConfig
from penstock.messages.base import Message
from penstock.messages.bus import ObjectStore
from penstock.messages.requests.ranks import rank_service

StreamRequest = Callable[..., AsyncIterator[Message]]
"""`Bus.stream_request`."""


def training_engine(
    config: RunConfig, store: ObjectStore, request: StreamRequest
) -> TrainingEngine:
    """Return the trainer's engine.

    Args:
        config: Of the run.
        store: Its objects.
        request: Sends a message to a rank's service.

    """
    if config.trainer.engine == "local":
        return LocalEngine(config.policy, config.trainer, Publisher(StoreIO(store)))
    uploads = RankUploads(store, config.trainer.ranks.num_ranks, request, rank_service)
    return RankedEngine(config.policy, config.trainer, request, uploads.publish)


def training_rank(
    config: RunConfig, store: ObjectStore, role_rank: str, opener: Vault
) -> TrainingRank:
    """Return the rank that this process's environment names; `role_rank` follows the role's colon.

    Raises:
        ConfigError: The environment is not as torchrun sets it, or not as the settings say.

    """
    environment = RankEnvironment.of(os.environ, config.trainer.ranks.allow_plain_text)
    check_environment(config, role_rank, environment.rank, environment.num_ranks)
    uploader = HeldShardUploader(StoreIO(store), environment.rank, environment.num_ranks)
    return TrainingRank(config.trainer, config.policy, environment, uploader, opener)
