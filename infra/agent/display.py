"""What a person sees of a conversation: no text of a model or tool passes for one of ours.

Such text has its control characters escaped and every line indented; ours begins a line.
"""

from collections.abc import Callable

from penstock.envs.harness.tool_calls import ToolResult
from penstock.infra.output import printable
from penstock.messages.rollout import ToolCall

_INDENT = "  "
_CUT = "..."


class Display:
    """Shows text as it is sampled, and calls with their results.

    Args:
        write: Puts text on the screen.
        num_chars_max: Of one message, call or result that are shown.

    """

    def __init__(self, write: Callable[[str], object], num_chars_max: int) -> None:
        self._write, self._num_chars_max = write, num_chars_max
        self._num_chars, self._is_at_start = 0, True

    def say(self, text: str) -> None:
        """Show one line of our own."""
        self.end_message()
        self._write(printable(text.replace("\n", " ")) + "\n")

    def hear(self, text: str) -> None:
        """Show the next part of the model's message."""
        left = self._num_chars_max - self._num_chars
        if left < 0:  # The mark of the cut was shown.
            return
        shown = text[:left] + (_CUT if len(text) > left else "")
        self._num_chars += len(text)
        for line in printable(shown).splitlines(keepends=True):
            self._write((_INDENT if self._is_at_start else "") + line)
            self._is_at_start = line.endswith("\n")

    def end_message(self) -> None:
        """End the model's message."""
        if not self._is_at_start:
            self._write("\n")
        self._num_chars, self._is_at_start = 0, True

    def show_call(self, call: ToolCall, result: ToolResult) -> None:
        """Show a call and what it returned."""
        given = " ".join(f"{name!r}={value!r}" for name, value in call.arguments.items())
        self.say(f"> {call.name!r} {given}"[: self._num_chars_max])
        self.hear(result.text)
        self.end_message()
