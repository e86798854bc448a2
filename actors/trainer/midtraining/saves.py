"""Saves of mid-training, from which a killed trainer resumes to the same bits.

A save is one object, a safetensors file of weights, moments and losses with a `SaveHead` in its
metadata; stores write objects atomically. The number of steps is the position in the corpus, since
the order of documents follows from the seed. The newest `NUM_KEPT` saves are kept until version 0
has a checkpoint.
"""

import logging
import struct

import msgspec
import xxhash
from safetensors.torch import load, save

from penstock.actors.policy.config import PolicyConfig
from penstock.actors.trainer.config import MidtrainConfig
from penstock.actors.trainer.midtraining.midtrain import Midtrainer
from penstock.messages.base import FORMAT
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError, CorruptDataError
from penstock.messages.reading.parsing import parse_json

log = logging.getLogger(__name__)
PREFIX = "midtrain/saves/"
NUM_KEPT = 2
"""One more than needed, in case that the newest is damaged."""
_HEAD = "head"
_WITHOUT_EFFECT = ("num_workers", "save_s", "uses_cache")
"""Settings that do not affect the weights."""


class SaveHead(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of a save."""

    purpose: str
    """Digest of everything that determines the weights; see `purpose_of`."""
    num_tokens: int
    elapsed_s: float
    """Seconds of mid-training up to the save."""
    num_saves: int
    """Number of saves, including this one."""
    num_resumed: int
    """Number of times that mid-training resumed from a save."""
    format: int = FORMAT


class _SafetensorsHead(msgspec.Struct):
    __metadata__: dict[str, str]


def purpose_of(
    config: MidtrainConfig, policy: PolicyConfig, seed: int, corpora: tuple[bytes, bytes]
) -> str:
    """Return the digest of everything that a mid-training's weights depend on."""
    settings = msgspec.structs.asdict(config)
    kept = {name: value for name, value in settings.items() if name not in _WITHOUT_EFFECT}
    digests = [xxhash.xxh3_128_hexdigest(data) for data in corpora]
    facts = [kept, msgspec.to_builtins(policy), seed, digests]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts, order="sorted"))


def encode_save(trainer: Midtrainer, head: SaveHead) -> tuple[str, bytes]:
    """Return the key and the bytes of a save."""
    data = save(trainer.state(), {_HEAD: msgspec.json.encode(head).decode()})
    return f"{PREFIX}{trainer.num_steps:08d}-{xxhash.xxh3_128_hexdigest(data)}", data


async def store_save(store: ObjectStore, key: str, data: bytes) -> None:
    """Store a save and delete the oldest, so that there are at most `NUM_KEPT`."""
    # Before the new save: the store never needs room for one more.
    for old in (await store.keys(PREFIX))[: 1 - NUM_KEPT]:
        await store.delete(old)
    await store.put(key, data)


async def drop_saves(store: ObjectStore) -> None:
    """Delete all saves, once version 0 has a checkpoint."""
    for key in await store.keys(PREFIX):
        await store.delete(key)


async def newest_save(store: ObjectStore, purpose: str) -> tuple[SaveHead, bytes] | None:
    """Return the newest undamaged save of this mid-training, or None."""
    for key in reversed(await store.keys(PREFIX)):
        data = await store.get(key)
        try:
            head = _checked_head(data, key)
        except CorruptDataError as error:
            log.warning("skipping a damaged save of mid-training: %s", error)
            continue
        if head.purpose == purpose and head.format == FORMAT:
            return head, data
        log.warning("skipping %s: a save of a mid-training with other settings or corpora", key)
    return None


def resume(trainer: Midtrainer, head: SaveHead, data: bytes) -> None:
    """Restore a mid-training from a save.

    Raises:
        CorruptDataError: The tensors do not fit this policy.

    """
    trainer.load_state(load(data), head.num_tokens)


def _checked_head(data: bytes, key: str) -> SaveHead:
    if xxhash.xxh3_128_hexdigest(data) != key.rpartition("-")[2]:
        raise CorruptDataError(f"{key}: the bytes do not match the digest in the name")
    return read_head(data, key)


def read_head(data: bytes, key: str) -> SaveHead:
    """Return the metadata of a save; `key` names it in errors.

    Raises:
        CorruptDataError: The bytes are not a save.

    """
    try:
        (size,) = struct.unpack_from("<Q", data)
        metadata = parse_json(data[8 : 8 + size], _SafetensorsHead, key).__metadata__
        return parse_json(metadata[_HEAD], SaveHead, key)
    except (struct.error, CodecError, KeyError) as error:
        raise CorruptDataError(f"{key}: not a save of mid-training: {error}") from error
