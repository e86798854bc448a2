"""Opens a chat format by the name in a run's configuration."""

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.renderers import PREFIX, RenderersChat
from penstock.actors.policy.chat.template import TEMPLATE, TemplateChat
from penstock.actors.policy.tokenizer import Tokenizer
from penstock.messages.errors import ConfigError

PENSTOCK = "penstock"


def open_chat(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format `penstock`, `template` or `renderers:NAME` with a tokenizer.

    Raises:
        ConfigError: There is no such format, or the tokenizer lacks a token that it needs.

    """
    if name == PENSTOCK:
        return PenstockChat(tokenizer)
    if name == TEMPLATE:
        return TemplateChat(tokenizer)
    if name.startswith(PREFIX):
        return RenderersChat(name.removeprefix(PREFIX), tokenizer)
    raise ConfigError(
        f"model.chat: expected {PENSTOCK!r}, {TEMPLATE!r} or '{PREFIX}NAME', got {name!r}"
    )
