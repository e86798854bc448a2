"""What a tool call gives back."""

import msgspec

from penstock.messages.errors import PenstockError


class ToolResult(msgspec.Struct, frozen=True, kw_only=True):
    """The observation of one call."""

    name: str
    text: str
    """What the policy reads; bounded by the task's `output_bytes_max`."""
    is_valid: bool = True
    """False where the call itself was wrong: an unknown tool, a bad argument, no unique match."""
    is_finish: bool = False
    """True where the agent said that it is done."""


class InvalidCallError(PenstockError, ValueError):
    """A call that cannot be carried out, told to the policy in these words."""


def truncate(text: str, num_bytes_max: int) -> str:
    """Cut a text to a number of UTF-8 bytes and say so."""
    data = text.encode("utf-8", "replace")
    if len(data) <= num_bytes_max:
        return text
    kept = data[:num_bytes_max].decode("utf-8", "ignore")
    return f"{kept}\n[cut, {len(data)} bytes in all]"
