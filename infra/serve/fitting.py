"""`infra/configs/serve.toml` for one model: its longest context, the chat format that it knows."""

from pathlib import Path
from typing import Any

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.open import PENSTOCK
from penstock.actors.policy.hf.config import read_hf_config
from penstock.actors.trainer.config import MidtrainConfig
from penstock.infra.models.claim import read_tokenizer
from penstock.messages.errors import ConfigError

Table = dict[str, Any]


def fit(data: Table, folder: Path) -> None:
    """Change the tables of a service's configuration to what a model's folder can do.

    Args:
        data: Tables that name a context and a chat format of their own.
        folder: Of the model.

    Raises:
        ConfigError: The tokenizer is missing, or is not one of bytes.
        ModelFormatError: The model cannot be computed; the text names file and key.

    """
    positions = read_hf_config(folder).max_position_embeddings
    generator, limits = data["generator"], data["prepare"]["limits"]
    for table in (generator, limits):
        table["num_tokens_max"] = min(table["num_tokens_max"], positions)
    midtrain = data["trainer"].setdefault("midtrain", {})  # Of whose corpora there are none.
    midtrain["sequence_tokens"] = min(MidtrainConfig().sequence_tokens, positions)
    half = max(1, generator["num_tokens_max"] // 2)
    limits["turn_tokens_max"] = min(limits["turn_tokens_max"], half)
    data["gateway"]["reply_tokens_max"] = min(data["gateway"]["reply_tokens_max"], half)
    try:
        PenstockChat(read_tokenizer(folder))
    except ConfigError:
        return
    data["model"]["chat"] = PENSTOCK
