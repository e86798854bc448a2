"""One end of the socket between tests and code under test: values, handles, requests, answers.

It runs in the guest, so it imports only the standard library. A message is one line of JSON. Plain
values are sent as copies of their exact types, all other objects as handles. Nothing from the other
end is executed or unpickled.
"""

import builtins
import datetime
import decimal
import fractions
import json
from collections.abc import Callable
from typing import Any, Protocol

LINE_BYTES_MAX = 8 << 20
_SCALARS = (type(None), bool, int, float, str)
_CONTAINERS = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
_TEXTS: dict[str, tuple[type, Callable[[str], Any]]] = {
    "bytes": (bytes, bytes.fromhex),
    "decimal": (decimal.Decimal, decimal.Decimal),
    "fraction": (fractions.Fraction, fractions.Fraction),
    "datetime": (datetime.datetime, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.fromisoformat),
}
_TAGS = {kind: tag for tag, (kind, _) in _TEXTS.items()} | {
    kind: tag for tag, kind in [*_CONTAINERS.items(), ("dict", dict)]
}


class PipeError(Exception):
    """The other end is gone, or sent an invalid message."""


class Side(Protocol):
    """The objects and operations of one end."""

    def serve(self, message: dict[str, Any]) -> Any:
        """Run a request of the other end and return a value."""
        ...

    def describe_error(self, error: BaseException) -> Any:
        """Return a description with which the other end can raise the error."""
        ...

    def reraise(self, described: Any) -> None:
        """Raise an error that the other end described."""
        ...

    def give(self, value: Any) -> Any:
        """Return a handle of an object that stays here."""
        ...

    def take(self, described: Any) -> Any:
        """Return the object of a handle from the other end."""
        ...


class Pipe:
    """Sends requests to the other end, and serves its requests while waiting for the answer.

    Args:
        line: A file over the socket.
        side: This end.

    """

    def __init__(self, line: Any, side: Side) -> None:
        self._line, self._side = line, side

    def ask(self, op: str, **fields: Any) -> Any:
        """Return the other end's answer, or raise its error."""
        self._send({"op": op} | {name: self.pack(value) for name, value in fields.items()})
        while True:
            message = self._receive()
            if "op" in message:
                self._answer(message)
            elif "raised" in message:
                self._side.reraise(message["raised"])
                raise PipeError("an answer without a value")
            else:
                return self.unpack(message.get("value"))

    def serve_all(self) -> None:
        """Serve requests until the other end closes the socket."""
        while True:
            try:
                message = self._receive()
            except PipeError:
                return
            self._answer(message)

    def _answer(self, message: dict[str, Any]) -> None:
        try:
            answer = {"value": self.pack(self._side.serve(message))}
        except BaseException as error:
            answer = {"raised": self._side.describe_error(error)}
        self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        self._line.write(json.dumps(message).encode() + b"\n")
        self._line.flush()

    def _receive(self) -> dict[str, Any]:
        line = self._line.readline(LINE_BYTES_MAX)
        if not line.endswith(b"\n"):
            raise PipeError("the other end is gone, or said too much at once")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise PipeError("no message")
        return message

    def pack(self, value: Any) -> Any:
        """Return the JSON form of a value."""
        # Exact types: a subclass may override its methods, so it stays behind a handle.
        kind = type(value)
        if kind in _SCALARS:
            return value
        if kind in _TAGS:
            return {_TAGS[kind]: self._packed_items(value)}
        if isinstance(value, type) and getattr(builtins, value.__name__, None) is value:
            return {"builtin": value.__name__}
        return {"handle": self._side.give(value)}

    def _packed_items(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, dict):
            return [[self.pack(key), self.pack(item)] for key, item in value.items()]
        if type(value) in _CONTAINERS.values():
            return [self.pack(item) for item in value]
        is_number = isinstance(value, decimal.Decimal | fractions.Fraction)
        return str(value) if is_number else value.isoformat()

    def unpack(self, packed: Any) -> Any:
        """Return the value of a JSON form; raises `PipeError` if it is invalid."""
        if type(packed) in _SCALARS:
            return packed
        if not isinstance(packed, dict) or len(packed) != 1:
            raise PipeError("no value")
        [(tag, inner)] = packed.items()
        if tag in _CONTAINERS:
            return _CONTAINERS[tag](self.unpack(item) for item in inner)
        if tag == "dict":
            return {self.unpack(key): self.unpack(item) for key, item in inner}
        if tag == "handle":
            return self._side.take(inner)
        if tag == "builtin" and isinstance(found := getattr(builtins, inner, None), type):
            return found
        if tag not in _TEXTS:
            raise PipeError(f"no value: {tag}")
        return _TEXTS[tag][1](inner)
