"""Saves of mid-training: what a killed trainer goes on from, to the same bits.

A save is one object, a safetensors file of weights, moments and losses whose metadata hold a
`SaveHead`; stores put atomically, so it is there whole or not at all. The position in the corpus is
the number of steps: the order of documents follows from the seed. The newest `NUM_KEPT` are kept,
and none once version 0 has its checkpoint.
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
"""One more than needed: the newest could be damaged."""
_HEAD = "head"
_NO_BITS = ("num_workers", "save_s", "uses_cache")
"""Settings that change no bit."""


class SaveHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a save knows of itself."""

    purpose: str
    """Digest of what determines the weights: a save of another mid-training is none of this one."""
    num_tokens: int
    elapsed_s: float
    """Of mid-training up to here."""
    num_saves: int
    """This one included."""
    num_resumed: int
    """Times that it went on from a save."""
    format: int = FORMAT


class _SafetensorsHead(msgspec.Struct):
    __metadata__: dict[str, str]


def purpose_of(
    config: MidtrainConfig, policy: PolicyConfig, seed: int, corpora: tuple[bytes, bytes]
) -> str:
    """Return the digest of everything that a mid-training's weights depend on."""
    settings = msgspec.structs.asdict(config)
    kept = {name: value for name, value in settings.items() if name not in _NO_BITS}
    digests = [xxhash.xxh3_128_hexdigest(data) for data in corpora]
    facts = [kept, msgspec.to_builtins(policy), seed, digests]
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(facts, order="sorted"))


def encode_save(trainer: Midtrainer, head: SaveHead) -> tuple[str, bytes]:
    """Return a save of a mid-training as it is, and its key."""
    data = save(trainer.state(), {_HEAD: msgspec.json.encode(head).decode()})
    return f"{PREFIX}{trainer.num_steps:08d}-{xxhash.xxh3_128_hexdigest(data)}", data


async def store_save(store: ObjectStore, key: str, data: bytes) -> None:
    """Put a save in the place of the oldest: there are never more than `NUM_KEPT`."""
    for old in (await store.keys(PREFIX))[: 1 - NUM_KEPT]:
        await store.delete(old)
    await store.put(key, data)


async def drop_saves(store: ObjectStore) -> None:
    """Delete all saves: version 0 has a checkpoint."""
    for key in await store.keys(PREFIX):
        await store.delete(key)


async def newest_save(store: ObjectStore, purpose: str) -> tuple[SaveHead, bytes] | None:
    """Return the newest save of this mid-training, or None; one that is damaged is passed over."""
    for key in reversed(await store.keys(PREFIX)):
        data = await store.get(key)
        try:
            head = _checked_head(data, key)
        except CorruptDataError as error:
            log.warning("a save of mid-training is passed over: %s", error)
            continue
        if head.purpose == purpose and head.format == FORMAT:
            return head, data
        log.warning("%s: is a save of another mid-training, with other settings or corpora", key)
    return None


def take_up(trainer: Midtrainer, head: SaveHead, data: bytes) -> None:
    """Put a mid-training where a save was.

    Raises:
        CorruptDataError: Tensors that are not this policy's.

    """
    trainer.load_state(load(data), head.num_tokens)


def _checked_head(data: bytes, key: str) -> SaveHead:
    if xxhash.xxh3_128_hexdigest(data) != key.rpartition("-")[2]:
        raise CorruptDataError(f"{key}: the bytes do not match the digest in the name")
    return read_head(data, key)


def read_head(data: bytes, key: str) -> SaveHead:
    """Return what a save knows of itself; `key` names it in errors.

    Raises:
        CorruptDataError: It is no save.

    """
    try:
        (size,) = struct.unpack_from("<Q", data)
        metadata = parse_json(data[8 : 8 + size], _SafetensorsHead, key).__metadata__
        return parse_json(metadata[_HEAD], SaveHead, key)
    except (struct.error, CodecError, KeyError) as error:
        raise CorruptDataError(f"{key}: not a save of mid-training: {error}") from error
