"""Opens the base of a server from its run's store."""

import asyncio
import tempfile
from pathlib import Path
from typing import Any, cast

import torch

from penstock.actors.policy.checkpoint import PUBLISHED_DTYPE, load_checkpoint
from penstock.actors.policy.hf.config import CONFIG_FILE
from penstock.actors.policy.hf.stored import fetch_model, stored_model
from penstock.actors.policy.model import Policy
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.infra.config.settings import RunConfig
from penstock.infra.tinker.executor import Base
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import NotFoundError
from penstock.messages.reading.parsing import parse_json


def names_of(config: RunConfig) -> tuple[str, ...]:
    """Return what clients may call the base: its name, if it has one, and its path."""
    return tuple(dict.fromkeys(filter(None, (config.tinker.model, config.model.checkpoint))))


async def open_base(store: ObjectStore, config: RunConfig) -> Base:
    """Load the base.

    Raises:
        NotFoundError: The store has no model.
        CorruptDataError: It is damaged.

    """
    stored = await stored_model(store)
    if stored is None:
        raise NotFoundError("model/: the store has no model; expected that of model.checkpoint")
    with tempfile.TemporaryDirectory(prefix="penstock-model-") as name:
        await fetch_model(store, stored, Path(name))
        policy = await asyncio.to_thread(_load, Path(name), config)
        end_ids = _end_ids(Path(name))
    text = (await store.get(TOKENIZER_KEY)).decode()
    context = min(config.generator.num_tokens_max, policy.config.max_position_embeddings)
    return Base(policy, Tokenizer.from_json(text, TOKENIZER_KEY), end_ids, context)


def _load(folder: Path, config: RunConfig) -> Policy:
    policy = load_checkpoint(folder, config.policy.numerics)
    with torch.no_grad():
        # Samplers have it in this dtype, so that trainer and samplers mean the same base.
        for parameter in policy.parameters():
            parameter.copy_(parameter.to(PUBLISHED_DTYPE))
    return policy.requires_grad_(False)


def _end_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens at which the model ends a reply, as its folder names them."""
    found: set[int] = set()
    for file in (folder / CONFIG_FILE, folder / "generation_config.json"):
        if file.is_file():
            ids: Any = parse_json(file.read_bytes(), dict[str, Any], file.name).get("eos_token_id")
            listed = cast("list[object]", ids) if isinstance(ids, list) else [ids]
            found |= {one for one in listed if isinstance(one, int)}
    return tuple(sorted(found))
