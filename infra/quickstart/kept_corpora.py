"""The tokenizer and the corpora of mid-training in the user's cache.

The key digests everything that their bytes depend on: settings and seed, code, the standard library
and the packages that draw and tokenize. Own corpora (`[[model.corpora]]`) are read each time.
"""

import hashlib
import random
import sys
from collections.abc import Callable
from importlib.metadata import version

import msgspec

from penstock.actors.runtime.products import ProductCache, source_digest
from penstock.infra.quickstart.midtrain_data import standard_library
from penstock.messages.reading.parsing import INPUT_BYTES_MAX, parse_with

Objects = dict[str, bytes]
FOLDER = "corpora"
_objects = msgspec.msgpack.Decoder(Objects)
_CODE = (
    *("actors/policy", "actors/rollout_worker", "actors/trainer/midtraining", "envs", "messages"),
    *("infra/quickstart", "infra/corpora"),
)


def kept_corpora(settings: object, build: Callable[[], Objects]) -> tuple[Objects, bool]:
    """Return the objects that `build` makes of some settings, and whether they were kept.

    Args:
        settings: All that `build` depends on but code and the standard library.
        build: Makes them, where the cache has none.

    """
    cache = ProductCache(FOLDER, bytes_max=INPUT_BYTES_MAX)
    key = _key(settings)
    if data := cache.get(key):
        return parse_with(_objects, data, FOLDER), True
    objects = build()
    cache.put(key, msgspec.msgpack.encode(objects))
    return objects, False


def _key(settings: object) -> str:
    machine = [sys.version, *map(version, ("numpy", "tokenizers"))]
    texts = standard_library(random.Random(0))
    facts = [msgspec.to_builtins(settings), source_digest(*_CODE), machine, texts]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]
