"""A checkpoint's folder: its shape into the configuration, its files checked and into the store."""

from pathlib import Path
from typing import Any, cast

import msgspec

from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, read_hf_config, read_json
from penstock.actors.policy.hf.peft import PEFT_CONFIG, PEFT_WEIGHTS, read_adapter_config
from penstock.actors.policy.hf.stored import TOKENIZER_FILES, StoredModel, store_model
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, ChatTemplate, Tokenizer, with_chat
from penstock.infra.models.settings import ModelSection
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError

Table = dict[str, Any]
_TOKENIZER_BYTES_MAX = 64 << 20
_TEMPLATE_CHARS_MAX = 1 << 18


def fill_shape(data: Table) -> None:
    """Set `[policy]` from the checkpoint of `[model]`, and `[trainer.adapter]` from its adapter.

    Paths become absolute (`whole_paths`).

    Raises:
        ConfigError: `[policy]` contradicts the checkpoint.
        ModelFormatError: The checkpoint cannot be computed; the text names file and key.

    """
    table: Any = data.get("model")
    model: Table = table if isinstance(table, dict) else {}  # pyright: ignore[reportUnknownVariableType]
    whole_paths(model)
    checkpoint = model.get("checkpoint")
    if not isinstance(checkpoint, str) or not checkpoint:
        return
    folder = Path(checkpoint)
    shape: Table = msgspec.to_builtins(read_hf_config(folder))
    del shape["numerics"], shape["adapter"]
    _fill(data.setdefault("policy", {}), shape, "policy", folder / CONFIG_FILE)
    trainer = data.setdefault("trainer", {})
    if isinstance(adapter := model.get("adapter"), str) and adapter and isinstance(trainer, dict):
        settings: Table = msgspec.to_builtins(read_adapter_config(Path(adapter)))
        table = cast("Table", trainer).setdefault("adapter", {})
        _fill(table, settings, "trainer.adapter", Path(adapter) / PEFT_CONFIG)


def _fill(table: Table, values: Table, name: str, file: Path) -> None:
    """Set what a file says, which the table must not contradict."""
    for key, value in values.items():
        found = table.setdefault(key, value)
        if (tuple(found) if isinstance(found, list) else found) != value:
            text = f"expected {value!r}, as {file} says, got {found!r}"
            raise ConfigError(f"{name}.{key}: {text}; leave it out")


def whole_paths(model: Table) -> None:
    """Make paths of `[model]` absolute: the run's own copy of the configuration is read elsewhere.

    What is no path is left as it is, to be refused as such.
    """

    def whole(path: object) -> object:
        return str(Path(path).expanduser().resolve()) if isinstance(path, str) and path else path

    model |= {name: whole(model[name]) for name in ("checkpoint", "adapter") if name in model}
    if isinstance(paths := model.get("preferences"), list):
        model["preferences"] = [whole(path) for path in cast("list[object]", paths)]
    corpora = model.get("corpora")
    for corpus in cast("list[object]", corpora) if isinstance(corpora, list) else ():
        if isinstance(corpus, dict) and "path" in corpus:
            table = cast("Table", corpus)
            table["path"] = whole(table["path"])


def open_model(section: ModelSection, policy: PolicyConfig) -> ChatFormat:
    """Check that a checkpoint's files are all there and fit, and open its chat format.

    Raises:
        ConfigError: The tokenizer is missing, is not one of bytes, lacks a token of the chat format
            or has more ids than the model; or there is no such format.
        ModelFormatError: Weights are missing or do not fit.

    """
    _weight_files(section, policy)
    if section.adapter and not policy.is_foreign:  # Others' names transformers knows.
        from penstock.actors.policy.checkpoint import adapter_shapes
        from penstock.actors.policy.hf.weights import find_adapters

        find_adapters(Path(section.adapter), adapter_shapes(policy))
    tokenizer = read_tokenizer(Path(section.checkpoint))
    if tokenizer.vocab_size > policy.vocab_size:
        raise ConfigError(
            f"model.checkpoint: {Path(section.checkpoint) / TOKENIZER_KEY}: its ids go up to "
            f"{tokenizer.vocab_size - 1}, but the model's vocab_size is {policy.vocab_size}"
        )
    return open_chat(section.chat, tokenizer)


def read_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a checkpoint's folder.

    Raises:
        ConfigError: It is missing, or is not one of bytes.

    """
    path = folder / TOKENIZER_KEY
    if not path.is_file() or path.stat().st_size > _TOKENIZER_BYTES_MAX:
        text = f"expected a file of at most {_TOKENIZER_BYTES_MAX} bytes"
        raise ConfigError(f"model.checkpoint: {path}: {text}")
    try:
        return Tokenizer.from_json(_tokenizer_text(folder), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"model.checkpoint: {path}: expected UTF-8 text: {error}") from error
    except ValueError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error


async def claim_model(
    section: ModelSection, policy: PolicyConfig, store: ObjectStore
) -> StoredModel:
    """Copy a checked checkpoint's files into the run's store.

    Raises:
        ModelFormatError: Weights are missing or do not fit.

    """
    folder = Path(section.checkpoint)
    paths = [folder / name for name in _weight_files(section, policy)]
    if section.adapter:
        paths += [Path(section.adapter) / name for name in (PEFT_CONFIG, PEFT_WEIGHTS)]
    stored = await store_model(store, folder, paths)
    await store.put(TOKENIZER_KEY, _tokenizer_text(folder).encode())
    return stored


def _tokenizer_text(folder: Path) -> str:
    """Return the folder's tokenizer.json, with its chat template in it if it has one."""
    text = (folder / TOKENIZER_KEY).read_text(encoding="utf-8")
    path, config = folder / "tokenizer_config.json", dict[str, Any]()
    if path.is_file():
        config = read_json(path, _TOKENIZER_BYTES_MAX)
    template = config.get("chat_template")
    # A folder may name several.
    if isinstance(template, list):
        tables = [_table(each) for each in cast("list[object]", template)]
        template = next(
            (one.get("template") for one in tables if one.get("name") == "default"), None
        )
    if (file := folder / "chat_template.jinja").is_file():
        template = file.read_text(encoding="utf-8")
    if not isinstance(template, str):
        return text
    if len(template) > _TEMPLATE_CHARS_MAX:
        expected = f"expected at most {_TEMPLATE_CHARS_MAX} characters"
        raise ConfigError(f"model.checkpoint: {folder}: chat template: {expected}")
    tokens = {name: _content(config.get(f"{name}_token")) for name in ("bos", "eos", "unk", "pad")}
    named_tokens = {f"{name}_token": each for name, each in tokens.items() if each is not None}
    return with_chat(text, ChatTemplate(template, named_tokens))


def _content(token: Any) -> str | None:
    """Return the text of a special token, which may be a table."""
    text = _table(token).get("content", token)
    return text if isinstance(text, str) else None


def _table(value: object) -> dict[str, Any]:
    """Return a table of a model's file; anything else is an empty one."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _weight_files(section: ModelSection, policy: PolicyConfig) -> list[str]:
    """Return the names of the weight files, and of their index if there is one."""
    from penstock.actors.policy.checkpoint import tensor_shapes
    from penstock.actors.policy.hf.weights import INDEX_FILE, find_weights, stored_shapes

    folder = Path(section.checkpoint)
    # Which tensors another architecture has, transformers knows: it checks them on loading.
    shapes = stored_shapes(folder) if policy.is_foreign else tensor_shapes(policy)
    names = [path.name for path in find_weights(folder, shapes).files]
    assert not set(names) & set(TOKENIZER_FILES)
    return [*names, INDEX_FILE] if (folder / INDEX_FILE).is_file() else names
