"""What commands print: one JSON object, on one line for programs or indented for people."""

import sys
from typing import Any

import msgspec


def print_result(result: Any, *, as_json: bool) -> None:
    """Print a command's result; `as_json` is its option `--json`."""
    encoded = msgspec.json.encode(result)
    text = encoded if as_json else msgspec.json.format(encoded, indent=2)
    sys.stdout.write(text.decode() + "\n")
