"""The tokenizer's part of an exported folder."""

import json
from typing import Any, NamedTuple

from penstock.actors.policy import special_tokens
from penstock.actors.policy.hf.config import CONFIG_FILE
from penstock.actors.policy.hf.stored import (
    MODEL_PREFIX,
    TOKENIZER_FILES,
    StoredModel,
    stored_model,
)
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.infra.export.chat_template import chat_template
from penstock.messages.bus import ObjectStore
from penstock.messages.reading.parsing import parse_json

_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


class TokenizerFiles(NamedTuple):
    """What goes beside the weights."""

    files: dict[str, bytes]
    """Content by name."""
    special_ids: dict[str, Any]
    """What config.json says of the tokenizer."""


async def tokenizer_files(store: ObjectStore, num_tokens_max: int) -> TokenizerFiles:
    """Return the files of a run's tokenizer, with its chat template and how it is sampled from.

    Raises:
        NotFoundError: The run has no tokenizer.
        ValueError: It is no tokenizer.

    """
    stored = await stored_model(store)
    if stored is not None:
        return await _outside_files(store, stored)
    data = await store.get(TOKENIZER_KEY)
    tokenizer = Tokenizer.from_json(data.decode(), TOKENIZER_KEY)
    # The class matters: without it AutoTokenizer picks one by `model_type`, which splits text by
    # rules of its own, and indented code differently.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": special_tokens.END,
        "pad_token": special_tokens.PAD,
        "model_max_length": num_tokens_max,
        "clean_up_tokenization_spaces": False,
    }
    special_ids = {
        "eos_token_id": tokenizer.special_id(special_tokens.END),
        "pad_token_id": tokenizer.special_id(special_tokens.PAD),
    }
    files = {
        "tokenizer.json": data,
        "tokenizer_config.json": _json(config),
        "chat_template.jinja": chat_template().encode(),
        "generation_config.json": _json({**special_ids, "do_sample": True, "temperature": 1.0}),
    }
    return TokenizerFiles(files, special_ids)


async def _outside_files(store: ObjectStore, stored: StoredModel) -> TokenizerFiles:
    """Return the files of a run that started from an outside model as that model has them."""
    names = [name for name in TOKENIZER_FILES if name in stored.digests]
    files = {name: await store.get(MODEL_PREFIX + name) for name in names}
    config = parse_json(await store.get(MODEL_PREFIX + CONFIG_FILE), dict[str, Any], CONFIG_FILE)
    return TokenizerFiles(files, {name: config[name] for name in _SPECIAL_IDS if name in config})


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode()
