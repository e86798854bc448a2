"""Parses and checks request bodies: what all routes share."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from penstock.actors.policy.chat.argument_types import parsed_arguments
from penstock.gateway.conversation import (
    NUM_BIASES_MAX,
    NUM_STOP_IDS_MAX,
    NUM_STOPS_MAX,
    STOP_CHARS_MAX,
    Call,
    ChoiceMode,
    SamplingOptions,
    Tool,
    ToolChoice,
)
from penstock.gateway.errors import ApiError, invalid
from penstock.messages.errors import CodecError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.task import TEMPERATURE_MIN, TOP_P_MIN

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)
TOOL_NAME_CHARS_MAX = 128
DEPTH_MAX = 64
"""Maximum nesting of a body, and of the arguments of a call."""
# How msgspec's error texts name a field.
_PATH = re.compile(r" - at `(?:\$\.?)?([^`]*)`")
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """The sampling fields that several routes share."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None

    def wishes(self, num_tokens_max: int | None, *, ignores_end: bool = False) -> SamplingOptions:
        """Return the fields as the options of a `LiveRequest`."""
        stop = self.stop or ()
        return SamplingOptions(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias or {},
            seed=self.seed,
            num_tokens_max=num_tokens_max,
            stops=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignores_end=ignores_end,
        )


def read_body(body: bytes, kind: type[S]) -> tuple[S, list[str]]:
    """Parse JSON as a struct; null fields count as absent, and unknown ones are returned by name.

    Returns:
        The struct, and the names of the fields that it does not have.

    Raises:
        ApiError: 400 that names the field.

    """
    table = _decoded(body, dict[str, Any])
    check_depth(table, None)
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    # Client libraries send null for fields that their user left out.
    given = {name: value for name, value in table.items() if value is not None}
    try:
        read = msgspec.convert({k: v for k, v in given.items() if k in known}, kind, str_keys=True)
    except (msgspec.ValidationError, OverflowError) as error:
        raise _as_api_error(error) from error
    return read, sorted(given.keys() - known)


def decode_body(body: bytes, kind: type[T]) -> T:
    """Parse JSON as a struct; unknown fields are an error if the struct forbids them.

    Raises:
        ApiError: 400 that names the field.

    """
    return _decoded(body, kind)


def check_depth(value: Any, param: str | None) -> None:
    """Refuse values nested too deeply for recursive code.

    Raises:
        ApiError: 400.

    """
    # Level by level, because recursion is what deep nesting would break.
    level = [value]
    for _ in range(DEPTH_MAX):
        level = [
            child
            for parent in level
            if isinstance(parent, dict | list)
            for child in (parent.values() if isinstance(parent, dict) else parent)
        ]
        if not level:
            return
    raise invalid(f"expected JSON nested at most {DEPTH_MAX} deep", param)


def read_call(name: str, arguments: object, call_id: str, param: str) -> Call:
    """Return a call of an earlier turn, even if its arguments are no JSON object.

    Args:
        name: Name of the tool.
        arguments: Arguments as JSON text or as an object; empty or None for none.
        call_id: Id of the call.
        param: Path of the arguments in the body, for errors.

    Raises:
        ApiError: 400, the arguments are nested too deeply.

    """
    table, is_readable = parsed_arguments(arguments)
    check_depth(table, param)
    return Call(call_id=call_id, name=name, arguments=table, is_malformed=not is_readable)


def check_tools(tools: Sequence[Tool], param: str = "tools") -> tuple[Tool, ...]:
    """Return the tools after checking that names are distinct and parameters are object schemas.

    Raises:
        ApiError: 400 that names the tool.

    """
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if not 0 < len(tool.name) <= TOOL_NAME_CHARS_MAX:
            text = f"expected a name of 1 to {TOOL_NAME_CHARS_MAX} characters"
            raise invalid(text, f"{param}[{index}]")
        if tool.name in seen:
            raise invalid(f"an earlier tool is named {tool.name!r}, too", f"{param}[{index}]")
        seen.add(tool.name)
        if not isinstance(tool.parameters.get("properties") or {}, dict):
            raise invalid("expected an object", f"{param}[{index}].function.parameters.properties")
    return tuple(tools)


def check_choice(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return the choice after checking that the tools allow it.

    Raises:
        ApiError: 400, there are no tools, or none of that name.

    """
    if choice.mode is ChoiceMode.REQUIRED and not tools:
        raise invalid("a tool is required, but the request has no tools", "tool_choice")
    if choice.name and choice.name not in {tool.name for tool in tools}:
        raise invalid(f"there is no tool {choice.name!r}", "tool_choice")
    return choice


def check_sampling(wishes: SamplingOptions, names: Mapping[str, str] = {}) -> SamplingOptions:
    """Return the sampling options after checking their ranges.

    Args:
        wishes: Options as parsed.
        names: Field of `wishes` -> its name in the route's body, where the two differ.

    Raises:
        ApiError: 400 that names the field.

    """

    def check(name: str, is_valid: bool, expected: str) -> None:
        if not is_valid:
            raise invalid(f"expected {expected}", names.get(name, name))

    temperature, top_p, seed = wishes.temperature, wishes.top_p, wishes.seed
    is_valid = not temperature or TEMPERATURE_MIN <= temperature <= 2
    check("temperature", is_valid, f"0, or a number from {TEMPERATURE_MIN:g} to 2")
    is_valid = top_p is None or TOP_P_MIN <= top_p <= 1
    check("top_p", is_valid, f"a number from {TOP_P_MIN:g} to 1")
    # Ranges follow OpenAI's API; clients of vLLM send -1 for no `top_k`.
    ranges = (
        ("top_k", -1, 2**31 - 1, "0, or the number of tokens to keep"),
        ("min_p", 0, 1, "a number from 0 to 1"),
        ("presence_penalty", -2, 2, "a number from -2 to 2"),
        ("frequency_penalty", -2, 2, "a number from -2 to 2"),
        ("repetition_penalty", 1e-3, 10, "a number from 0.001 to 10"),
    )
    for name, least, most, expected in ranges:
        value = getattr(wishes, name)
        check(name, value is None or least <= value <= most, expected)
    is_valid = len(wishes.logit_bias) <= NUM_BIASES_MAX
    check("logit_bias", is_valid, f"at most {NUM_BIASES_MAX} tokens")
    is_valid = all(-100 <= bias <= 100 for bias in wishes.logit_bias.values())
    check("logit_bias", is_valid, "numbers from -100 to 100")
    is_valid = len(wishes.stop_token_ids) <= NUM_STOP_IDS_MAX
    check("stop_token_ids", is_valid, f"at most {NUM_STOP_IDS_MAX} token ids")
    check("seed", seed is None or -(2**63) <= seed < 2**63, "a 64-bit integer")
    limit = wishes.num_tokens_max
    check("num_tokens_max", limit is None or limit >= 1, "at least 1")
    is_valid = len(wishes.stops) <= NUM_STOPS_MAX
    check("stops", is_valid, f"at most {NUM_STOPS_MAX} texts")
    is_valid = all(0 < len(stop) <= STOP_CHARS_MAX for stop in wishes.stops)
    check("stops", is_valid, f"texts of 1 to {STOP_CHARS_MAX} characters")
    return wishes


def _decoded(body: bytes, kind: type[T]) -> T:
    try:
        return parse_json(body, kind, "body")
    except CodecError as error:
        if isinstance(error.__cause__, msgspec.ValidationError):
            raise _as_api_error(error.__cause__) from error
        raise ApiError(400, "invalid_json", f"the body is not JSON: {error}") from error


def _as_api_error(error: Exception) -> ApiError:
    text = str(error)
    # msgspec gives the path in the text; clients expect it in the field `param`.
    place = _PATH.search(text)
    path = place.group(1) if place else ""
    named = _UNKNOWN.search(text) or _MISSING.search(text)
    if named:
        path = f"{path}.{named.group(1)}" if path else named.group(1)
    return invalid(_PATH.sub("", text), path or None)
