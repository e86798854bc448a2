"""Copies of a model's folder in a run's object store, written by the launcher for the trainer.

From then on the run depends only on its store, and the folder may be deleted. Must not import
torch.
"""

import logging
from collections.abc import Collection
from pathlib import Path

import msgspec
from blake3 import blake3

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.hf.config import CONFIG_FILE, config_json
from penstock.actors.policy.hf.foreign import foreign_config_json
from penstock.actors.policy.tokenizer import TOKENIZER_KEY
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.parsing import parse_json

log = logging.getLogger(__name__)

MODEL_PREFIX = "model/"
INDEX_KEY = "model/index"
TOKENIZER_FILES = (
    TOKENIZER_KEY,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
"""Files copied together with the weights if the folder has them."""


class StoredModel(msgspec.Struct, frozen=True, kw_only=True):
    """Index of a model's files in the store."""

    digests: dict[str, str]
    """BLAKE3 digest of each file, by file name."""


async def store_model(store: ObjectStore, folder: Path, weights: Collection[Path]) -> StoredModel:
    """Copy the files of a model's folder to the store.

    Args:
        store: Object store of the run.
        folder: Folder of the model; the caller has checked it.
        weights: Weight files, their index if there is one, and an adapter's files.

    """
    names = [CONFIG_FILE, *(name for name in TOKENIZER_FILES if (folder / name).is_file())]
    digests: dict[str, str] = {}
    for path in [*(folder / name for name in names), *sorted(weights)]:
        data = path.read_bytes()
        digests[path.name] = blake3(data).hexdigest()
        await store.put(MODEL_PREFIX + path.name, data)
    # The index comes last, so that it only names objects that exist.
    stored = StoredModel(digests=digests)
    await store.put(INDEX_KEY, msgspec.json.encode(stored, order="sorted"))
    log.info("stored model from %s, %d files", folder, len(digests))
    return stored


async def stored_model(store: ObjectStore) -> StoredModel | None:
    """Return the index of the stored model, or None if there is none."""
    if not await store.exists(INDEX_KEY):
        return None
    try:
        return parse_json(await store.get(INDEX_KEY), StoredModel, INDEX_KEY)
    except CodecError as error:
        raise CorruptDataError(str(error)) from error


async def fetch_model(store: ObjectStore, stored: StoredModel, folder: Path) -> None:
    """Write the files of a stored model to a folder.

    Raises:
        CorruptDataError: An object does not match its digest, or a name is not a plain file name.

    """
    for name, digest in stored.digests.items():
        data = await store.get(MODEL_PREFIX + name)
        # A damaged index must not make us write outside the folder.
        if name != Path(name).name or blake3(data).hexdigest() != digest:
            raise CorruptDataError(f"{MODEL_PREFIX}{name}: the bytes do not match their digest")
        (folder / name).write_bytes(data)


async def published_config(store: ObjectStore, policy: PolicyConfig) -> str:
    """Return the text of the config.json for the weights that a run publishes."""
    if not policy.is_foreign:
        return config_json(policy)
    return foreign_config_json((await store.get(MODEL_PREFIX + CONFIG_FILE)).decode())
