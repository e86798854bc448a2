"""The JSON types that a schema accepts for one argument, and the conversion of text to them.

Policies write arguments as text, or as JSON that is kept as text (`ToolCall`). A schema may state
its types in many ways: `type` as a name or a list, `anyOf`, `oneOf`, `allOf`, `$ref`, `enum`,
`const`, keywords of a single type such as `properties`, or nothing. Schemas come from clients, so
any part may be missing or have another type, and references may form cycles.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import unquote

from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
UNREADABLE = "arguments"
"""Argument that holds the text of arguments that are no JSON object."""
_DEPTH_MAX = 16
"""Maximum nesting of `anyOf`, `allOf` and references; deeper parts count as unconstrained."""
_NUM_ALTERNATIVES_MAX = 64
"""Maximum alternatives of one argument; a schema with more counts as unconstrained."""
_NUM_PARTS_MAX = 1000
"""Maximum parts of one schema that are read; the others count as unconstrained."""
_TYPE_KEYWORDS = {
    "properties": "object",
    "additionalProperties": "object",
    "patternProperties": "object",
    "items": "array",
    "prefixItems": "array",
}
"""Keywords that in practice declare a type, where a schema leaves `type` out."""


class Alternative(NamedTuple):
    """One kind of value that a schema accepts."""

    types: frozenset[str] = ALL_TYPES
    values: tuple[Any, ...] | None = None
    """The accepted values of `enum` or `const`; None for any value of `types`."""
    keywords: frozenset[str] = frozenset()
    """Further keywords, such as `pattern`, which constrain the value."""


_UNCONSTRAINED = (Alternative(),)


def parsed_arguments(arguments: object) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a call in a conversation's history, and whether they were readable.

    A call that was cut off, or that another model wrote wrongly, stays in every later copy of its
    conversation. Instead of refusing all of it, its text is kept as one argument, which shows the
    policy what was written. Such a turn is context and never a target of training.

    Args:
        arguments: JSON text, as most protocols send them, or an object; empty or None for none.

    """
    table = arguments or {}
    if isinstance(table, str):
        try:
            table = parse_json(table, object, "arguments")
        except CodecError:
            table = str(arguments)
    if isinstance(table, dict):
        return table, True
    text = table if isinstance(table, str) else json.dumps(table, ensure_ascii=False)
    return {UNREADABLE: text}, False


def typed_value(text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return an argument as the JSON value that its schema accepts, or as text if none fits.

    A text that is valid JSON of an accepted type becomes that value, even where a string would be
    accepted, too: a policy that means an optional argument's absence writes null.

    Args:
        text: Argument as the policy wrote it.
        schema: Schema of the argument.
        root: Schema of all arguments, whose definitions `schema` may refer to.

    """
    found = alternatives(schema, root)
    if any(text in (choice.values or ()) for choice in found):
        return text
    accepted = frozenset[str]().union(*(choice.types for choice in found))
    if accepted == {"string"}:
        return text
    try:
        value = parse_json(text, object, "argument")
    except CodecError:
        return text
    if isinstance(value, float) and "number" not in accepted and value.is_integer():
        value = int(value)
    names = _types_of(value)
    return value if names & accepted and "string" not in names else text


def alternatives(schema: Any, root: Mapping[str, Any]) -> tuple[Alternative, ...]:
    """Return the kinds of values that a schema accepts."""
    found = _Reader(root).read(schema)
    return found if 0 < len(found) <= _NUM_ALTERNATIVES_MAX else _UNCONSTRAINED


def referred(root: Mapping[str, Any], name: str) -> object:
    """Return the value that a `$ref` points to, as a JSON pointer into the schema.

    Raises:
        KeyError: The reference leads out of the schema, or to nothing in it.

    """
    value: object = root
    head, *parts = unquote(name).split("/")
    if head != "#":
        raise KeyError(name)
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        # Nine digits exceed any list here, and int() of a very long text is slow.
        elif isinstance(value, list) and key.isdecimal() and int(key[:9]) < len(value):
            value = value[int(key)]
        else:
            raise KeyError(name)
    return value


class _Reader:
    """Reads one schema; bounds its depth and the number of parts, which references multiply."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_left = _NUM_PARTS_MAX

    def read(self, schema: Any, depth: int = 0) -> tuple[Alternative, ...]:
        values = schema.get("enum") if isinstance(schema, Mapping) else None
        # Values count, too: references multiply them.
        self._num_left -= 1 + (len(values) if isinstance(values, list) else 0)
        if not isinstance(schema, Mapping) or depth > _DEPTH_MAX or self._num_left < 0:
            return _UNCONSTRAINED
        found: tuple[Alternative, ...] = (_own(schema),)
        for group in self._groups(schema, depth):
            merged = [
                both for one in found for other in group if (both := _merged(one, other)).types
            ]
            # Bounded here, since groups multiply.
            found = tuple(merged[: _NUM_ALTERNATIVES_MAX + 1]) or _UNCONSTRAINED
        return found

    def _groups(self, schema: Mapping[str, Any], depth: int) -> Iterator[tuple[Alternative, ...]]:
        """Yield the alternatives of each part; a value must satisfy all parts together."""
        name = schema.get("$ref")
        if isinstance(name, str):
            try:
                yield self.read(referred(self._root, name), depth + 1)
            except KeyError:
                yield _UNCONSTRAINED
        for keyword in ("anyOf", "oneOf"):
            parts = schema.get(keyword)
            if isinstance(parts, list):
                found = [choice for part in parts for choice in self.read(part, depth + 1)]
                yield tuple(found[: _NUM_ALTERNATIVES_MAX + 1])
        parts = schema.get("allOf")
        if isinstance(parts, list):
            for part in parts:
                yield self.read(part, depth + 1)


def _own(schema: Mapping[str, Any]) -> Alternative:
    """Return what the schema's own keywords accept."""
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    named = schema.get("type")
    if isinstance(values, list):
        types = frozenset[str]().union(*map(_types_of, values))
    elif isinstance(named, str | list):
        types = frozenset([named] if isinstance(named, str) else filter(_is_text, named))
        types |= {"integer"} if "number" in types else frozenset()
    else:
        types = frozenset(kind for keyword, kind in _TYPE_KEYWORDS.items() if keyword in schema)
    keywords = frozenset({"pattern", "format", "minLength", "maxLength"} & schema.keys())
    exact = tuple(values) if isinstance(values, list) else None
    return Alternative((types & ALL_TYPES) or ALL_TYPES, exact, keywords)


def _merged(one: Alternative, other: Alternative) -> Alternative:
    values = other.values if one.values is None else one.values
    return Alternative(one.types & other.types, values, one.keywords | other.keywords)


def _types_of(value: Any) -> frozenset[str]:
    """Return the names of a JSON value's types; an integer is a number, too."""
    if value is None:
        return frozenset({"null"})
    # Before int, of which bool is a subclass.
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset({kinds.get(type(value), "object")})


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def choices_text(found: tuple[Alternative, ...]) -> list[str] | None:
    """Return the texts that a schema accepts if it lists only strings, else None."""
    texts: list[str] = []
    for choice in found:
        if not choice.values or not all(map(_is_text, choice.values)):
            return None
        texts += [json.dumps(text, ensure_ascii=False) for text in choice.values]
    return texts or None
