"""JSON schemas as parts of a grammar, bounded before anything recursive reads them."""

import json
from collections.abc import Mapping
from typing import Any

from penstock.messages.errors import PenstockError

DEPTH_MAX = 48
"""Nesting of a schema, which costs the library three levels for each of its own."""
SCHEMA_CHARS_MAX = 1 << 16
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


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the grammar of one JSON value."""
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
        return json_rule(definitions | dict(schema))
    if strict and kind is None and schema:
        raise GrammarError(f"{where}: expected a type in a strict tool of this format")
    return "/(?s:.*)/"


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
