"""A tool call: its arguments, checked and typed, and its result. The policy writes text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec

from penstock.envs.sandbox import WORK_DIR
from penstock.messages.errors import ConfigError, PenstockError


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The observation of one call."""

    name: str
    text: str
    """What the policy reads; bounded by the task's `output_bytes_max`."""
    is_valid: bool = True
    """False where the call itself was wrong: an unknown tool, a bad argument, no unique match."""
    is_finish: bool = False
    """Whether the agent called `finish`."""


class InvalidCallError(PenstockError, ValueError):
    """A call that cannot be carried out; the policy reads this text."""


def truncate(text: str, num_bytes_max: int) -> str:
    """Cut a text to a number of UTF-8 bytes, and append how many it had."""
    data = text.encode("utf-8", "replace")
    if len(data) <= num_bytes_max:
        return text
    kept = data[:num_bytes_max].decode("utf-8", "ignore")
    return f"{kept}\n[cut, {len(data)} bytes in all]"


_PATH_CHARACTERS_MAX = 255
_STRAY_BYTE = re.compile("[\udc80-\udcff]")
"""A byte that is not UTF-8, as Python keeps it in names."""
# All bytes in a row, since a character may take several.
_ESCAPED = re.compile(r"(?:\\x[0-9a-f]{2})+")
_TRUTHS = {"true": True, "false": False}


class ArgumentType(StrEnum):
    """Types by their names in JSON schemas."""

    TEXT = "string"
    INTEGER = "integer"
    FLAG = "boolean"


@dataclass(frozen=True)
class Argument:
    """One argument of a tool."""

    description: str
    kind: ArgumentType | Literal["string", "integer", "boolean"] = ArgumentType.TEXT
    default: str | int | bool | None = None
    """None: the call must give it."""
    bound_min: int = 0
    """Least value of an integer, least characters of a text."""
    bound_max: int = 4_096

    def __post_init__(self) -> None:
        """Take the type by its name, too."""
        if self.kind not in tuple(ArgumentType):
            choices = ", ".join(ArgumentType)
            raise ConfigError(f"Argument.kind: expected one of {choices}, got {self.kind!r}")
        object.__setattr__(self, "kind", ArgumentType(self.kind))

    @property
    def is_required(self) -> bool:
        """Whether a call without it is invalid."""
        return self.default is None

    def schema(self) -> dict[str, object]:
        """Return its JSON schema."""
        schema: dict[str, object] = {"type": str(self.kind), "description": self.description}
        if self.kind is ArgumentType.INTEGER:
            schema |= {"minimum": self.bound_min, "maximum": self.bound_max}
        elif self.kind is ArgumentType.TEXT:
            schema |= {"minLength": self.bound_min, "maxLength": self.bound_max}
        return schema if self.is_required else schema | {"default": self.default}

    def parse(self, name: str, text: str) -> str | int | bool:
        """Return the value of a text.

        Raises:
            InvalidCallError: Not of the type, or out of bounds.

        """
        if self.kind is ArgumentType.FLAG:
            if text not in _TRUTHS:
                raise InvalidCallError(f"{name} must be true or false")
            return _TRUTHS[text]
        if self.kind is ArgumentType.INTEGER:
            return self._integer(name, text)
        if not self.bound_min <= len(text) <= self.bound_max or "\0" in text:
            bounds = f"{self.bound_min} to {self.bound_max}"
            raise InvalidCallError(f"{name} must be {bounds} characters, none of them NUL")
        return text

    def _integer(self, name: str, text: str) -> int:
        digits = text.removeprefix("-")
        is_integer = digits.isascii() and digits.isdigit() and len(digits) <= 12
        if not is_integer or not self.bound_min <= int(text) <= self.bound_max:
            raise InvalidCallError(
                f"{name} must be an integer from {self.bound_min} to {self.bound_max}"
            )
        return int(text)


@dataclass(frozen=True)
class RawText(Argument):
    """An argument of version 1: a text that only its tool checks."""

    description: str = ""

    def schema(self) -> dict[str, object]:
        """Return its JSON schema."""
        return {"type": str(self.kind)}

    def parse(self, name: str, text: str) -> str:
        """Return the text as it is."""
        return text


def checked_arguments(
    tool: str, declared: Mapping[str, Argument], given: Mapping[str, str]
) -> dict[str, Any]:
    """Return every declared argument's value.

    Raises:
        InvalidCallError: One is missing, unknown, of a wrong type or out of bounds.

    """
    missing = [name for name, one in declared.items() if one.is_required and name not in given]
    if missing:
        raise InvalidCallError(f"{tool} needs {', '.join(missing)}")
    unknown = [name for name in given if name not in declared]
    if unknown:
        raise InvalidCallError(f"{tool} takes no {', '.join(unknown)}")
    return {
        name: one.parse(name, given[name]) if name in given else one.default
        for name, one in declared.items()
    }


def checked_path(path: str) -> str:
    """Return a path relative to the working directory, in its shortest form.

    An absolute path below the working directory is accepted, and bytes in the form of `shown_path`.

    Raises:
        InvalidCallError: empty, too long, not printable, or outside the working directory.

    """
    is_printable = _STRAY_BYTE.sub("", path).isprintable()
    if not path.strip() or len(path) > _PATH_CHARACTERS_MAX or not is_printable:
        raise InvalidCallError(f"path must be 1 to {_PATH_CHARACTERS_MAX} printable characters")
    pure = PurePosixPath(path.strip())
    if pure.is_absolute():
        if not pure.is_relative_to(WORK_DIR):
            raise InvalidCallError(f"path is outside {WORK_DIR}")
        pure = pure.relative_to(WORK_DIR)
    if ".." in pure.parts:
        raise InvalidCallError("path must not hold ..")
    # After the checks: an escaped slash or dot is part of a name that was listed.
    return _ESCAPED.sub(_real_bytes, str(pure))


def shown_path(path: str) -> str:
    r"""Return a path as tools list it, such that `checked_path` gets the same file back.

    Names may hold bytes that are not UTF-8, line breaks and control characters; those are shown as
    `\xe9`, and a backslash before an x as `\x5c`.
    """
    return "".join(
        char if char.isprintable() else _escaped_bytes(char)
        for char in path.replace("\\x", "\\x5cx")
    )


def shown_text(text: str) -> str:
    r"""Return what a tool says as valid Unicode; bytes that are not UTF-8 are shown as `\xe9`."""
    return _STRAY_BYTE.sub(lambda found: _escaped_bytes(found[0]), text)


def _escaped_bytes(char: str) -> str:
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))


def _real_bytes(found: re.Match[str]) -> str:
    data = bytes.fromhex(found[0].replace("\\x", ""))
    # A NUL or a slash cannot be part of a name, so such an escape was not listed.
    return found[0] if b"\0" in data or b"/" in data else data.decode("utf-8", "surrogateescape")
