"""The `[model]` section: the model that a run starts from. Imports nothing heavy."""

import msgspec

from penstock.messages.errors import ConfigError


class ModelSection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes version 0; by default a policy of `[policy]`'s shape with random weights."""

    checkpoint: str = ""
    """Folder of a model in Hugging Face's layout; its shape and its tokenizer are the run's."""
    chat: str = "penstock"
    """The chat format that it reads and writes: `penstock`, or `renderers:NAME`, e.g.
    `renderers:qwen3`, over the package `renderers`."""
    text: list[str] = []
    """Files and folders for mid-training: every token is a target. `.jsonl`: lines of `text`."""
    traces: list[str] = []
    """JSON lines of conversations for mid-training: only the assistant's tokens are targets."""

    preferences: list[str] = []
    """JSON lines of pairs and labels, trained by DPO and KTO (`[trainer.preferences]`) after
    mid-training, before RL."""

    def __post_init__(self) -> None:
        """Check that what needs a checkpoint has one."""
        for field in ("text", "traces", "preferences"):
            if getattr(self, field) and not self.checkpoint:
                text = "expected with it model.checkpoint: its tokenizer reads them"
                raise ConfigError(f"model.{field}: {text}")
        if self.chat != "penstock" and not self.checkpoint:
            text = f"expected 'penstock' where there is no model.checkpoint, got {self.chat!r}"
            raise ConfigError(f"model.chat: {text}")

    @property
    def has_corpus(self) -> bool:
        """Whether mid-training has something to read."""
        return bool(self.text or self.traces)
