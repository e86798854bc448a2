"""Converts the state of a fold to plain values and back, without running any code that data names.

```
 fold ──pack──▶ values that msgpack encodes ──unpack──▶ the same attributes of a fold built anew
```
Records (msgspec structs, dataclasses, enums) are data: they are created from their fields, which
msgspec checks. Any other object must exist already, built by its own class: only its attributes are
set, and containers are filled in place, so references to them stay valid. Methods stay as
they are, and so do settings: the digest of those that a state depends on is compared instead.
"""

import dataclasses
import itertools
import sys
from array import array
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from enum import Enum
from functools import cache
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, TypeGuard, cast

import msgspec
import numpy as np
import xxhash

from penstock.messages.errors import CodecError

_PLAIN = frozenset({type(None), bool, int, float, str, bytes})
_SKIPPED = (FunctionType, MethodType, BuiltinMethodType, type)
_DICTS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict, "OrderedDict": OrderedDict, "Counter": Counter, "defaultdict": defaultdict,
}  # fmt: skip
_LISTS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque,
}  # fmt: skip
_LISTS_FILLED: dict[str, type[Any]] = {"list": list, "deque": deque}
_PACKAGE = "penstock."
Tree = list[Any]
"""`[kind, ...]`: the kind of a value and what it is made of."""


class Packer:
    """Packs one state; `settings` is then the digest of the settings that it depends on."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._classes: dict[type, int] = {}
        self._settings: dict[int, object] = {}

    @property
    def classes(self) -> list[str]:
        """Classes of records, which trees name by their index here."""
        return [_name_of(kind) for kind in self._classes]

    @property
    def settings(self) -> str:
        """Digest of the settings met so far."""
        encoded = sorted(repr(each) for each in self._settings.values())
        return xxhash.xxh3_128_hexdigest("\n".join(encoded).encode())

    def pack(self, value: Any) -> Tree:  # noqa: PLR0911 - one for each kind
        """Return the tree of a value.

        Raises:
            TypeError: Part of it is neither data nor an object with attributes.

        """
        kind = cast("Any", type(value))
        if kind in _PLAIN:
            return ["plain", value]
        if kind.__name__ in _DICTS and isinstance(value, dict):
            table = cast("dict[Any, Any]", value)
            if any(issubclass(each, _SKIPPED) for each in set(map(type, table))):
                return ["kept"]  # Handlers by type of event.
            # A single call that no other thread can interrupt, because a gateway keeps running
            # meanwhile.
            pairs = list(table.items())
            keys = self._items([key for key, _ in pairs])
            values = self._items([value for _, value in pairs])
            return ["dict", kind.__name__, keys, values]
        if kind.__name__ in _LISTS and kind.__module__ in {"builtins", "collections"}:
            return ["list", kind.__name__, self._items(list(value))]
        if is_settings(value):
            self._settings[id(value)] = value
            return ["kept"]
        if is_record(kind):
            return ["record", self._index(kind), self._encoder.encode(value)]
        if issubclass(kind, Enum):
            return ["enum", self._index(kind), value.value]
        return self._other(kind, value)

    def _other(self, kind: type, value: Any) -> Tree:
        if kind is itertools.count:
            return ["count", value.__reduce__()[1][0]]
        if isinstance(value, array):
            return ["array", value.typecode, value.tobytes()]
        if isinstance(value, np.ndarray):
            numbers = cast("np.ndarray[Any, Any]", value)
            return ["numpy", numbers.dtype.str, list(numbers.shape), numbers.tobytes()]
        if isinstance(value, _SKIPPED):
            return ["kept"]
        if not kind.__module__.startswith(_PACKAGE):
            raise TypeError(f"a snapshot cannot hold {kind.__module__}.{kind.__name__}")
        names = attributes_of(value)
        return ["object", {name: self.pack(getattr(value, name)) for name in names}]

    def _items(self, items: list[Any]) -> Tree:
        """Pack items of one kind together, because the tables of a fold have millions."""
        kinds: set[type[Any]] = set(map(type, items))
        if kinds <= _PLAIN:
            return ["plain", items]
        if len(kinds) == 1:
            (kind,) = kinds
            if is_record(kind) and not is_settings(items[0]):
                return ["records", self._index(kind), self._encoder.encode(items)]
            if kind is tuple and set(map(type, itertools.chain.from_iterable(items))) <= _PLAIN:
                return ["tuples", items]
        return ["each", [self.pack(item) for item in items]]

    def _index(self, kind: type) -> int:
        return self._classes.setdefault(kind, len(self._classes))


def attributes_of(value: object) -> list[str]:
    """Return the names of an object's attributes that belong to its state."""
    kept = getattr(type(value), "saved", None)
    if kept is not None:
        return list(kept)
    unsaved: Iterable[str] = getattr(type(value), "unsaved", ())
    return [name for name in vars(value) if name not in unsaved]


def is_settings(value: object) -> bool:
    """Return whether a value comes from the configuration, whose structs refuse unknown fields."""
    return isinstance(value, msgspec.Struct) and value.__struct_config__.forbid_unknown_fields


@cache
def is_record(kind: Any) -> bool:
    """Return whether a class is data of known types, which msgspec encodes and checks."""
    if not (issubclass(kind, msgspec.Struct) or dataclasses.is_dataclass(kind)):
        return False
    try:
        _decoder(kind)
    except TypeError:
        return False
    return True


@cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


@cache
def _list_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(list[kind])


def _name_of(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


class Unpacker:
    """Fills newly built state from trees.

    Args:
        classes: Names of the records and enums that the trees refer to.

    Raises:
        CodecError: One of them is not a data class of this program.

    """

    def __init__(self, classes: list[str]) -> None:
        self._classes: list[Any] = [_data_class(name) for name in classes]

    def fill(self, tree: Tree, fresh: Any) -> Any:  # noqa: PLR0911 - one for each kind
        """Return the value of a tree; fill and return `fresh` where possible.

        Raises:
            CodecError: The tree belongs to another state than this one.

        """
        kind: str = tree[0]
        if kind in {"kept", "plain"}:
            return fresh if kind == "kept" else tree[1]
        if kind == "object":
            return self._object(tree[1], fresh)
        if kind == "dict":
            return self._dict(tree[1], tree[2], tree[3], fresh)
        if kind == "list":
            return self._list(tree[1], tree[2], fresh)
        if kind == "record":
            return _merged(fresh, _decoder(self._classes[tree[1]]).decode(tree[2]))
        if kind == "enum":
            return self._classes[tree[1]](tree[2])
        if kind == "count":
            return itertools.count(tree[1])
        if kind == "array":
            made: Any = array  # Of any type code.
            return made(tree[1], tree[2])
        if kind == "numpy":
            return np.frombuffer(tree[3], np.dtype(tree[1])).reshape(tree[2]).copy()
        raise CodecError(f"snapshot: unknown kind of value {kind[:40]!r}")

    def _object(self, fields: dict[str, Tree], fresh: Any) -> Any:
        names = attributes_of(fresh) if hasattr(fresh, "__dict__") else []
        if set(names) != set(fields):
            what = sorted(set(names) ^ set(fields))[:4]
            raise CodecError(f"snapshot: {type(fresh).__name__} differs in {', '.join(what)}")
        for name, tree in fields.items():
            setattr(fresh, name, self.fill(tree, getattr(fresh, name)))
        return fresh

    def _dict(self, kind: str, keys: Tree, values: Tree, fresh: Any) -> Any:
        is_there = isinstance(fresh, dict)
        table = cast("dict[Any, Any]", fresh) if is_there else _DICTS[kind]()
        names: list[Any] = self._all(keys)
        if values[0] == "each":
            # Objects, which must exist, or methods and settings, which stay.
            found = [
                self.fill(tree, table.get(name))
                for name, tree in zip(names, values[1], strict=True)
            ]
        else:
            found = self._all(values)
        table.clear()
        # Not `update`: Counter's adds, and dict's would ignore an OrderedDict's order.
        for name, value in zip(names, found, strict=True):
            table[name] = value
        return table

    def _list(self, kind: str, items: Tree, fresh: Any) -> Any:
        found = self._all(items)
        if kind in {"list", "deque"} and isinstance(fresh, _LISTS_FILLED[kind]):
            there = cast("list[Any]", fresh)
            there.clear()
            there.extend(found)
            return there
        return _LISTS[kind](found)

    def _all(self, tree: Tree) -> list[Any]:
        kind: str = tree[0]
        if kind == "plain":
            return tree[1]
        if kind == "tuples":
            return [tuple(item) for item in tree[1]]
        if kind == "records":
            return _list_decoder(self._classes[tree[1]]).decode(tree[2])
        if kind == "each":
            return [self.fill(each, None) for each in tree[1]]
        raise CodecError(f"snapshot: unknown kind of list {kind[:40]!r}")


def _data_class(name: str) -> type:
    """Return a record class or enum of this package that is already imported."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module) if module.startswith(_PACKAGE) else None
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type) or not (is_record(found) or issubclass(found, Enum)):
        raise CodecError(f"snapshot: expected records of this program, got {name[:80]!r}")
    return found


def _is_mutable(value: object) -> TypeGuard[msgspec.Struct]:
    return isinstance(value, msgspec.Struct) and not value.__struct_config__.frozen


def _merged(fresh: Any, found: Any) -> Any:
    """Return `found`, or the existing struct of its kind with the same fields."""
    if type(fresh) is not type(found) or not _is_mutable(fresh):
        return found
    for name in fresh.__struct_fields__:
        old, new = getattr(fresh, name), getattr(found, name)
        if isinstance(old, dict) and isinstance(new, dict):
            cast("dict[Any, Any]", old).clear()
            cast("dict[Any, Any]", old).update(cast("dict[Any, Any]", new))
        elif isinstance(old, list) and isinstance(new, list):
            old[:] = cast("list[Any]", new)
        else:
            setattr(fresh, name, _merged(old, new))
    return fresh
