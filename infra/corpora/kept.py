"""Caches the tokenizer and the corpora of mid-training in the user's cache.

The key digests everything that their bytes depend on: settings and seed, code, the standard library
and the packages that draw and tokenize. Texts of `[[model.corpora]]` are not cached.
"""

import hashlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path

import msgspec
import xxhash

from penstock.actors.runtime.products import ProductCache, source_digest
from penstock.messages.reading.parsing import INPUT_BYTES_MAX, parse_with

Objects = dict[str, bytes]
FOLDER = "corpora"
_objects = msgspec.msgpack.Decoder(Objects)
_CODE = (
    *("actors/policy", "actors/rollout_worker", "actors/trainer/midtraining", "envs", "messages"),
    "infra/corpora",
)
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "__pycache__"})


def kept_corpora(settings: object, make: str, build: Callable[[], Objects]) -> tuple[Objects, bool]:
    """Return the objects of `build`, and whether they come from the cache.

    Args:
        settings: Everything that `build` depends on, except for code and the standard library.
        make: Custom code that `build` calls, `module:name`.
        build: Function that makes the objects.

    """
    # Bounded by what the decoder accepts, or an entry could never be read.
    cache = ProductCache(FOLDER, bytes_max=INPUT_BYTES_MAX)
    key = _key(settings, make)
    if data := cache.get(key):
        return parse_with(_objects, data, FOLDER), True
    objects = build()
    cache.put(key, msgspec.msgpack.encode(objects))
    return objects, False


def _key(settings: object, make: str) -> str:
    machine = [sys.version, *map(version, ("numpy", "tokenizers"))]
    code = [source_digest(*_CODE), _digest(_own_code(make)), _digest(_library())]
    facts = [msgspec.to_builtins(settings), make, code, machine]
    return hashlib.sha256(msgspec.json.encode(facts, order="sorted")).hexdigest()[:32]


def _library() -> list[Path]:
    # The quickstart's documents are drawn from the standard library's sources.
    root = Path(sysconfig.get_path("stdlib"))
    return [
        one for one in root.rglob("*.py") if not _NOT_LIBRARY & set(one.relative_to(root).parts)
    ]


def _own_code(make: str) -> Iterable[Path]:
    """Return the files of custom code: its package, or all files next to its module."""
    found = importlib.util.find_spec(make.partition(":")[0])
    if found is None or found.origin is None:
        return ()
    folder = Path(found.origin).parent
    # A single module may import its neighbors, but not what is in folders below.
    is_packaged = found.submodule_search_locations is not None or bool(found.parent)
    return folder.rglob("*.py") if is_packaged else folder.glob("*.py")


def _digest(files: Iterable[Path]) -> str:
    hasher = xxhash.xxh3_128()
    for path in sorted(files):
        # The name, too: moving code between files may change what an import finds.
        hasher.update(f"{path.name}\0".encode() + path.read_bytes())
    return hasher.hexdigest()
