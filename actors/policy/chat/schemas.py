"""JSON schemas as parts of a grammar, bounded before anything recursive reads them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from penstock.messages.errors import PenstockError

DEPTH_MAX = 48
"""Nesting of a schema, which costs the library three levels for each of its own."""
SCHEMA_CHARS_MAX = 1 << 16
NUM_MERGED_MAX = 50_000
"""Values that `allOf` and the like may write out."""
NUM_REFS_MAX = 64
"""Definitions on the way to a value that is written out."""
_ALONE = frozenset({"$ref", "$defs", "definitions", "$schema", "$comment", "title", "description"})
"""Beside a `$ref`, what asks for nothing more."""
_RENAMING = ("$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef")
_SPACES = r"[ \n]{0,16}"
"""Whitespace between JSON tokens, bounded: a policy could write it for ever."""
_JSON_OPTIONS = {"whitespace_pattern": _SPACES}


class GrammarError(PenstockError, ValueError):
    """A schema or a choice of tools that no grammar can be made of; the text names the field."""


def check_schema(schema: object, where: str) -> None:
    """Check a schema's size, without recursion.

    Raises:
        GrammarError: It is no object, too large, or nested too deep.

    """
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{where}: expected an object")
    level: list[object] = [schema]
    for _ in range(DEPTH_MAX):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            break
    else:
        raise GrammarError(f"{where}: expected at most {DEPTH_MAX} levels of nesting")
    if len(json.dumps(schema)) > SCHEMA_CHARS_MAX:
        raise GrammarError(f"{where}: expected at most {SCHEMA_CHARS_MAX} characters of JSON")


def json_rule(schema: Mapping[str, Any], where: str) -> str:
    """Return the grammar of one JSON value.

    Raises:
        GrammarError: Merging its parts would take too much; names `where`.

    """
    _check_merged(schema, where)
    return "%json " + json.dumps(dict(schema) | {"x-guidance": _JSON_OPTIONS})


def text_rule(
    schema: Mapping[str, Any], root: Mapping[str, Any], where: str, *, strict: bool
) -> str:
    """Return the grammar of an argument that is written as plain text, or as JSON.

    Strings are written as they are, values of other types as JSON.

    Args:
        schema: of the argument.
        root: of all arguments, whose definitions it may refer to.
        where: the argument, for errors.
        strict: refuse what a plain text cannot be held to; else allow any text there.

    Raises:
        GrammarError: Strict, and the schema asks for a `pattern`, `format` or mixed type.

    """
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return "(" + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices) + ")"
    kind = schema.get("type")
    kind = kind if isinstance(kind, str) else None
    if kind == "string":
        if strict and (unfit := {"pattern", "format"} & schema.keys()):
            names = ", ".join(sorted(unfit))
            raise GrammarError(f"{where}: {names}: not supported in a strict tool by this format")
        return f"/(?s:.{_length(schema)})/"
    if kind in {"integer", "number", "boolean", "null", "array", "object"}:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return json_rule(definitions | dict(schema), where)
    if strict and kind is None and schema:
        raise GrammarError(f"{where}: expected a type in a strict tool of this format")
    return "/(?s:.*)/"


def _check_merged(root: Mapping[str, Any], where: str) -> None:
    """Bound what the library copies where it merges schemas.

    It keeps a rule for a `$ref` alone, but writes out what `allOf`, or a `$ref` beside other
    keywords, refers to, all the way down: thirty definitions that name the next one twice take all
    memory, whatever its own limits are.

    Raises:
        GrammarError: They are too many, or named in a way that is not followed here.

    """
    nodes = list(_nodes(root))
    merged = [node for node in nodes if _merges(node)]
    if not merged:
        return
    if any(isinstance(node.get(name), str) for node in nodes[1:] for name in _RENAMING):
        names = ", ".join(_RENAMING)
        raise GrammarError(f"{where}: {names}: not supported beside allOf, or $ref with other keys")
    waiting: list[tuple[object, tuple[str, ...]]] = [(node, ()) for node in merged]
    num_merged = 0
    while waiting:
        value, path = waiting.pop()  # The path: all `$ref`s that led here.
        inside = _inside(value)
        waiting += [(inner, path) for inner in inside]
        num_merged += 1 + len(inside)
        if num_merged > NUM_MERGED_MAX or len(path) > NUM_REFS_MAX:
            text = "allOf, or $ref beside other keys, merges more than is taken here"
            raise GrammarError(f"{where}: {text}")
        name = value.get("$ref") if isinstance(value, Mapping) else None
        if isinstance(name, str) and name not in path:
            waiting.append((_referred(root, name, where), (*path, name)))


def _nodes(root: object) -> Iterator[Mapping[str, Any]]:
    """Yield all objects of a schema, the schema first."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
        waiting += _inside(value)


def _merges(node: Mapping[str, Any]) -> bool:
    return "allOf" in node or ("$ref" in node and bool(node.keys() - _ALONE))


def _referred(root: Mapping[str, Any], name: str, where: str) -> object:
    """Return what a `$ref` names, as a JSON pointer into the schema."""
    value: object = root
    head, *parts = unquote(name).split("/")
    for part in parts:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping) and key in value:
            value = value[key]
        elif isinstance(value, list) and key.isdecimal() and int(key[:9]) < len(value):
            value = value[int(key)]
        else:
            head = ""
            break
    if head != "#":
        raise GrammarError(f"{where}: $ref: expected #/ and a place in this schema, got {name!r}")
    return value


def _length(schema: Mapping[str, Any]) -> str:
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not isinstance(least, int) or not (most is None or isinstance(most, int)):
        return "*"
    if least <= 0 and most is None:
        return "*"
    return f"{{{max(0, least)},{'' if most is None else max(most, 0)}}}"


def _inside(value: object) -> list[object]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
