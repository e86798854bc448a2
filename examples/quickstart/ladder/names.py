"""Names for files, functions and variables: many combinations, some kept from training."""

import functools
import hashlib
import random

NOUNS = (
    "width", "price", "score", "level", "speed", "angle", "depth", "frame", "block", "harbor",
    "table", "field", "label", "vector", "index", "order", "shape", "color", "event", "route",
    "stock", "cache", "batch", "layer", "point", "track", "chart", "report", "record", "window",
    "member", "ticket", "filter", "buffer", "spring", "branch", "parcel", "bucket", "module",
    "screen",
)  # fmt: skip
_NUMBERS = (
    "value", "count", "size", "total", "limit", "low", "high", "start", "stop", "first", "last",
    "left", "right", "base", "rate", "step", "weight", "height", "length", "offset", "amount",
    "minute", "hour", "year", "rank",
)  # fmt: skip
_LISTS = (
    "items", "values", "rows", "data", "numbers", "scores", "prices", "points", "sizes", "nodes",
    "levels", "results",
)  # fmt: skip
_STRINGS = (
    "text", "line", "name", "word", "label", "token", "path", "title", "key", "prefix", "suffix",
    "message",
)  # fmt: skip
_STRING_LISTS = ("words", "lines", "names", "labels", "tokens", "paths", "keys", "parts")
_ITEMS = ("x", "y", "v", "n", "k", "item", "entry", "node", "cell", "number")
_INDEXES = ("i", "j", "pos", "at", "where")
_RESULTS = ("result", "out", "found", "seen", "total", "best", "state")
_POOLS = {
    "xs": _LISTS, "ys": _LISTS, "ws": _STRING_LISTS, "s": _STRINGS, "p": _STRINGS,
    "i": _INDEXES, "t": _RESULTS, "r": _RESULTS, "x": _ITEMS, "w": _ITEMS,
}  # fmt: skip


def is_kept_out(*parts: str) -> bool:
    """Return whether this combination belongs to the held-out split: about one in five does.

    The answer depends on the parts alone, never on a run's seed.
    """
    digest = hashlib.sha256("/".join(parts).encode()).digest()
    return digest[0] % 5 == 0


def draw_function_name(rng: random.Random, verbs: tuple[str, ...], *, heldout: bool) -> str:
    """Return a verb and a noun whose pair belongs to the asked split."""
    return "_".join(rng.choice(_pairs(verbs, heldout)))


@functools.cache
def _pairs(verbs: tuple[str, ...], heldout: bool) -> list[tuple[str, str]]:
    return [(verb, noun) for verb in verbs for noun in NOUNS if is_kept_out(verb, noun) == heldout]


def draw_variables(rng: random.Random, slots: list[str], params: dict[str, str]) -> dict[str, str]:
    """Return a different variable name for each slot, fitting what the slot holds."""
    chosen: dict[str, str] = {}
    for slot in slots:
        pool = _pool(slot, params.get(slot))
        free = [name for name in pool if name not in chosen.values()]
        chosen[slot] = rng.choice(free)
    return chosen


def _pool(slot: str, kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return _POOLS.get(slot, _ITEMS)
    if kind in {"text", "word", "letters", "dotted", "dash"}:
        return _STRINGS
    return _POOLS[slot] if slot in {"xs", "ys", "ws"} else _NUMBERS
