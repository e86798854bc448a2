"""What commands print: plain text, whatever the data says; JSON for programs or for people."""

import re
import sys
from typing import Any, TextIO, TypeVar, cast

import msgspec

T = TypeVar("T", bound=msgspec.Struct)
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What a terminal acts upon or cannot show: all controls but tab and newline, marks that reorder
text, lone surrogates."""


def printable(text: str) -> str:
    """Return text that a terminal shows and does not obey; also valid where it is JSON."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def printable_struct(value: T) -> T:
    """Return a copy of a struct of which all texts are `printable`."""
    return msgspec.convert(_printable(msgspec.to_builtins(value)), type(value), str_keys=False)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        fields = cast("dict[Any, Any]", value)
        return {_printable(key): _printable(each) for key, each in fields.items()}
    if isinstance(value, list | tuple):
        return [_printable(each) for each in cast("list[Any]", value)]
    return value


def print_line(
    *values: object, end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print like `print`; a terminal obeys nothing of it."""
    text = " ".join(map(str, values))
    print(printable(text), end=end, file=file, flush=flush)


def write_to(stream: TextIO, text: str) -> None:
    """Write to stdout or stderr; a terminal obeys nothing of it."""
    stream.write(printable(text))


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a command's result; `as_json` is its option `--json`."""
    encoded = msgspec.json.encode(result)
    text = encoded if as_json else msgspec.json.format(encoded, indent=2)
    sys.stdout.write(printable(text.decode()) + "\n")
