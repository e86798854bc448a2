"""The `[model]` section: the model that a run starts from. Imports nothing heavy."""

from typing import Literal

import msgspec

from penstock.messages.errors import ConfigError
from penstock.messages.settings import NonNegativeFloat, NonNegativeInt


class CorpusConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """User-supplied documents for mid-training."""

    path: str
    """File or folder of files; each row of a `.jsonl` or `.parquet` file is one document."""
    kind: Literal["text", "messages"] = "text"
    """text: files, or rows with `text`; every token is a target. messages: rows with `messages`,
    conversations of which only the assistant's tokens are."""
    weight: NonNegativeFloat = 1.0
    """Loss weight of each target token."""
    tokens_max: NonNegativeInt = 0
    """Token budget; reading stops after the document that reaches it. 0: read everything."""


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Model that becomes version 0; by default random weights in the shape of `[policy]`."""

    checkpoint: str = ""
    """Folder of a model in Hugging Face layout; the run uses its shape and its tokenizer."""
    adapter: str = ""
    """Folder of PEFT whose LoRA adapters train on, beside `checkpoint`; `trainer.adapter` follows
    from it. By default adapters begin without an effect."""
    chat: str = "penstock"
    """Chat format of the model: `penstock`; `template`, the chat template of the checkpoint;
    or `renderers:NAME` (for example `renderers:qwen3`), which uses the package `renderers`."""
    corpora: tuple[CorpusConfig, ...] = ()
    """Corpora for mid-training; without a checkpoint, they follow those of `prepare.corpora`."""
    preferences: list[str] = []
    """JSON-lines files of pairs and labels, trained with DPO and KTO (`[trainer.preferences]`)
    after mid-training and before RL."""

    def __post_init__(self) -> None:
        """Check that settings that need a checkpoint come with one."""
        if self.preferences and not self.checkpoint:
            text = "expected with it model.checkpoint: its tokenizer reads them"
            raise ConfigError(f"model.preferences: {text}")
        if self.adapter and not self.checkpoint:
            raise ConfigError("model.adapter: expected with it model.checkpoint, its base")
        if self.chat != "penstock" and not self.checkpoint:
            text = f"expected 'penstock' where there is no model.checkpoint, got {self.chat!r}"
            raise ConfigError(f"model.chat: {text}")

    @property
    def has_corpus(self) -> bool:
        """Whether any corpus is configured for mid-training."""
        return bool(self.corpora)
