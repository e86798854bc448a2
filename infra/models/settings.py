"""The `[model]` section: the model that a run starts from. Imports nothing heavy."""

from typing import Literal

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt


class CorpusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Documents of one's own for mid-training."""

    path: str
    """A file, or a folder of files; of a `.jsonl` or `.parquet` file, each row is a document."""
    kind: Literal["text", "messages"] = "text"
    """text: files, or rows with `text`; every token is a target. messages: rows with `messages`,
    conversations of which only the assistant's tokens are."""
    weight: NonNegativeFloat = 1.0
    """Of a token as a target."""
    tokens_max: NonNegativeInt = 0
    """Stop after the document with which so many tokens are read; 0: read all."""


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes version 0; by default a policy of `[policy]`'s shape with random weights."""

    checkpoint: str = ""
    """Folder of a model in Hugging Face's layout; its shape and its tokenizer are the run's."""
    chat: str = "penstock"
    """The chat format that it reads and writes: `penstock`, or `renderers:NAME`, e.g.
    `renderers:qwen3`, over the package `renderers`."""
    corpora: tuple[CorpusConfig, ...] = ()
    """What mid-training reads; without a checkpoint, after what `prepare.corpora` makes."""
    preferences: list[str] = []
    """JSON lines of pairs and labels, trained by DPO and KTO (`[trainer.preferences]`) after
    mid-training, before RL."""

    def __post_init__(self) -> None:
        """Check that what needs a checkpoint has one."""
        if self.preferences and not self.checkpoint:
            text = "expected with it model.checkpoint: its tokenizer reads them"
            raise ConfigError(f"model.preferences: {text}")
        if self.chat != "penstock" and not self.checkpoint:
            text = f"expected 'penstock' where there is no model.checkpoint, got {self.chat!r}"
            raise ConfigError(f"model.chat: {text}")

    @property
    def has_corpus(self) -> bool:
        """Whether mid-training has something to read."""
        return bool(self.corpora)
