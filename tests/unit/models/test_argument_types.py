"""Arguments reach clients in the JSON type that their schema accepts, however it is stated."""

from typing import Any

import pytest

from penstock.actors.policy.chat.argument_types import typed_value
from penstock.actors.policy.chat.format import typed_arguments
from penstock.actors.policy.chat.schemas import GrammarError, text_rule
from penstock.messages.rollout import ToolCall

ROOT = {
    "$defs": {
        "Point": {"type": "object", "properties": {"x": {"type": "integer"}}},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Mode": {"enum": ["fast", "slow"]},
    }
}
INTEGER, NULL, STRING = {"type": "integer"}, {"type": "null"}, {"type": "string"}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        (INTEGER, "5", 5),
        (INTEGER, "5.0", 5),
        (INTEGER, "5.5", "5.5"),
        (INTEGER, "many", "many"),
        ({"type": "number"}, "5", 5),
        ({"type": "number"}, "0.5", 0.5),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"type": ["integer", "null"]}, "null", None),
        ({"anyOf": [INTEGER, NULL], "default": None}, "5", 5),
        ({"anyOf": [{"type": "array", "items": STRING}, NULL]}, '["a"]', ["a"]),
        ({"oneOf": [{"type": "object"}]}, '{"a":1}', {"a": 1}),
        ({"$ref": "#/$defs/Point"}, '{"x":1}', {"x": 1}),
        ({"allOf": [{"$ref": "#/$defs/Point"}], "description": "d"}, '{"x":1}', {"x": 1}),
        ({"anyOf": [{"$ref": "#/$defs/Point"}, NULL]}, '{"x":1}', {"x": 1}),
        ({"enum": [1, 2]}, "2", 2),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": 4}, "4", 4),
        ({"const": "4"}, "4", "4"),
        ({"$ref": "#/$defs/Mode"}, "fast", "fast"),
        ({"properties": {"a": INTEGER}}, '{"a":1}', {"a": 1}),
        ({"items": INTEGER}, "[1]", [1]),
        ({}, "true", True),
        ({}, "plain text", "plain text"),
        ({}, '"quoted"', '"quoted"'),
        (STRING, "5", "5"),
        (STRING, "null", "null"),
        ({"anyOf": [STRING, NULL]}, "null", None),
        ({"anyOf": [STRING, NULL]}, "5", "5"),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"$ref": "#/$defs/None"}, "5", 5),
        ({"$ref": "https://example.org/x"}, "5", 5),
        ({"type": 7, "anyOf": "x"}, "5", 5),
        (True, "5", 5),
        ({"type": "boolean"}, "1", "1"),
        (INTEGER, "true", "true"),
    ],
)
def test_an_argument_gets_a_type_that_its_schema_accepts(schema: Any, text: str, value: Any):
    got = typed_value(text, schema, ROOT)
    assert (type(got), got) == (type(value), value)


def test_definitions_are_found_in_the_schema_of_all_arguments():
    parameters = ROOT | {"properties": {"at": {"$ref": "#/$defs/Point"}}}
    call = ToolCall(name="t", arguments={"at": '{"x":1}'})
    assert typed_arguments(call, parameters) == {"at": {"x": 1}}
    assert typed_arguments(call, "no schema") == {"at": {"x": 1}}


def test_a_schema_of_many_alternatives_is_bounded():
    schema: Any = INTEGER
    for _ in range(40):
        schema = {"anyOf": [schema, schema], "allOf": [schema, schema]}
    assert typed_value("5", schema, {}) == 5


@pytest.mark.parametrize(
    "schema",
    [
        {"type": ["integer", "null"]},
        {"anyOf": [INTEGER, NULL]},
        {"$ref": "#/$defs/Point"},
        {"allOf": [{"$ref": "#/$defs/Point"}]},
    ],
)
def test_strict_tools_may_have_nullable_and_referred_types(schema: dict[str, Any]):
    assert text_rule(schema, ROOT, "t.v", strict=True).startswith("%json ")


def test_strict_tools_may_have_strings_or_null_but_no_mixture_that_text_cannot_enforce():
    assert text_rule({"anyOf": [STRING, NULL]}, ROOT, "t.v", strict=True) == "/(?s:.*)/"
    assert text_rule({"$ref": "#/$defs/Mode"}, ROOT, "t.v", strict=True) == '("fast" | "slow")'
    for schema in ({"anyOf": [STRING, {"type": "object"}]}, {"not": STRING}):
        with pytest.raises(GrammarError, match=r"t\.v"):
            text_rule(schema, ROOT, "t.v", strict=True)
