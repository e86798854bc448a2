"""Grammar rules for JSON schemas, whose size is checked before any recursive code reads them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.actors.policy.chat.argument_types import (
    Alternative,
    alternatives,
    choices_text,
    referred,
)
from penstock.messages.errors import PenstockError

DEPTH_MAX = 48
"""Maximum nesting of a schema; the library recurses three levels for each of them."""
SCHEMA_CHARS_MAX = 1 << 16
"""Maximum length of a schema as JSON text, in characters."""
NUM_MERGED_MAX = 50_000
"""Maximum values that `allOf` and similar keywords may expand to."""
NUM_REFS_MAX = 64
"""Maximum chain of references that leads to an expanded value."""
_ALONE = frozenset({"$ref", "$defs", "definitions", "$schema", "$comment", "title", "description"})
"""Keywords that add no constraint next to a `$ref`."""
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords that constrain nothing."""
_RENAMING = ("$id", "id", "$anchor", "$dynamicAnchor", "$dynamicRef")
"""Keywords that change what a `$ref` points to, which `_referred` does not follow."""
_SPACES = r"[ \n]{0,16}"
"""Whitespace between JSON tokens; bounded, since a policy could otherwise write it forever."""
_JSON_OPTIONS = {"whitespace_pattern": _SPACES}


class GrammarError(PenstockError, ValueError):
    """A schema or tool choice that cannot be expressed as a grammar; the text names the field."""


def check_schema(schema: object, where: str) -> None:
    """Check the size and nesting of a schema without recursion.

    Raises:
        GrammarError: The schema is not an object, too large, or too deeply nested.

    """
    if not isinstance(schema, Mapping):
        raise GrammarError(f"{where}: expected an object")
    # Level by level: recursion would overflow the stack on a hostile schema.
    level: list[object] = [schema]
    for _ in range(DEPTH_MAX):
        level = [inner for value in level for inner in _inside(value)]
        if not level:
            break
    else:
        raise GrammarError(f"{where}: expected at most {DEPTH_MAX} levels of nesting")
    # After the check of nesting, since json.dumps recurses.
    if len(json.dumps(schema)) > SCHEMA_CHARS_MAX:
        raise GrammarError(f"{where}: expected at most {SCHEMA_CHARS_MAX} characters of JSON")


def json_rule(schema: Mapping[str, Any], where: str) -> str:
    """Return the grammar of one JSON value.

    Raises:
        GrammarError: Merging parts of the schema would use too much memory; names `where`.

    """
    _check_merged(schema, where)
    return "%json " + json.dumps(dict(schema) | {"x-guidance": _JSON_OPTIONS})


def text_rule(
    schema: Mapping[str, Any], root: Mapping[str, Any], where: str, *, strict: bool
) -> str:
    """Return the grammar of an argument: strings as plain text, values of other types as JSON.

    Args:
        schema: Schema of the argument.
        root: Schema of all arguments, whose definitions the argument's schema may refer to.
        where: Name of the argument, for errors.
        strict: Whether to refuse constraints that plain text cannot enforce; if false, any text is
            allowed in such a place.

    Raises:
        GrammarError: `strict` is set and the schema uses a `pattern`, `format` or mixed type.

    """
    found = alternatives(schema, root)
    if choices := choices_text(found):
        return "(" + " | ".join(choices) + ")"
    accepted = frozenset[str]().union(*(choice.types for choice in found))
    if "string" not in accepted:
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return json_rule(definitions | dict(schema), where)
    if accepted == {"string"} and len(found) == 1:
        # Lengths are enforced where the argument's own schema states them.
        unfit = found[0].keywords - ({"minLength", "maxLength"} & schema.keys())
        if strict and unfit:
            names = ", ".join(sorted(unfit))
            text = "not supported by this chat format in a strict tool"
            raise GrammarError(f"{where}: {names}: {text}")
        return f"/(?s:.{_length(schema)})/"
    if strict and not _takes_any_text(found, schema):
        text = "expected no constraint next to a string of another type, in a strict tool"
        raise GrammarError(f"{where}: {text}")
    return "/(?s:.*)/"


def _takes_any_text(found: tuple[Alternative, ...], schema: Mapping[str, Any]) -> bool:
    """Return whether each text is a valid value: as a string, or as JSON of a simple type."""
    if found == (Alternative(),):
        return not schema.keys() - _ANNOTATIONS
    compound = {"array", "object"}
    return all(
        not choice.keywords and choice.values is None and not compound & choice.types
        for choice in found
    )


def _check_merged(root: Mapping[str, Any], where: str) -> None:
    """Bound how much the library copies when it merges schemas.

    The library turns a lone `$ref` into a rule, but expands what `allOf`, or a `$ref` next to other
    keywords, refers to, recursively. Thirty definitions that each refer to the next one twice would
    use up all memory, whatever the library's own limits.

    Raises:
        GrammarError: Too much would be merged, or a reference cannot be followed here.

    """
    nodes = list(_nodes(root))
    merged = [node for node in nodes if _merges(node)]
    if not merged:
        return
    if any(isinstance(node.get(name), str) for node in nodes[1:] for name in _RENAMING):
        names = ", ".join(_RENAMING)
        text = f"{names} are not supported together with allOf, or with $ref next to other keys"
        raise GrammarError(f"{where}: {text}")
    waiting: list[tuple[object, tuple[str, ...]]] = [(node, ()) for node in merged]
    num_merged = 0
    while waiting:
        # The path has all `$ref`s that led to the value, so that cycles end.
        value, path = waiting.pop()
        inside = _inside(value)
        waiting += [(inner, path) for inner in inside]
        num_merged += 1 + len(inside)
        if num_merged > NUM_MERGED_MAX or len(path) > NUM_REFS_MAX:
            text = (
                f"allOf, or $ref next to other keys: expected at most {NUM_MERGED_MAX} merged "
                f"values and {NUM_REFS_MAX} nested references"
            )
            raise GrammarError(f"{where}: {text}")
        name = value.get("$ref") if isinstance(value, Mapping) else None
        if isinstance(name, str) and name not in path:
            waiting.append((_referred(root, name, where), (*path, name)))


def _nodes(root: object) -> Iterator[Mapping[str, Any]]:
    """Yield all objects in a schema, starting with the schema itself."""
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping):
            yield value
        waiting += _inside(value)


def _merges(node: Mapping[str, Any]) -> bool:
    return "allOf" in node or ("$ref" in node and bool(node.keys() - _ALONE))


def _referred(root: Mapping[str, Any], name: str, where: str) -> object:
    try:
        return referred(root, name)
    except KeyError as error:
        text = f"$ref: expected a #/ path within this schema, got {name!r}"
        raise GrammarError(f"{where}: {text}") from error


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
