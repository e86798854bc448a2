"""Pages: texts of a task that `read_file` shows once each.

No machine holds them: a page that was read exists only in the policy's context. Which pages were
read follows from the calls, so that a resumed episode has the same pages left.
"""

from collections.abc import Iterable, Mapping

from penstock.envs.harness.tool_calls import InvalidCallError, checked_path
from penstock.messages.rollout import ToolCall

READ_FILE = "read_file"


class Pages:
    """The pages of one episode, by path."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._texts = texts
        self._read: set[str] = set()

    def __contains__(self, path: str) -> bool:
        return path in self._texts

    def read(self, path: str) -> str:
        """Return a page, once.

        Raises:
            InvalidCallError: The page was read before.

        """
        if path in self._read:
            raise InvalidCallError(f"{path} cannot be read again")
        self._read.add(path)
        return self._texts[path]

    def skip(self, calls: Iterable[ToolCall]) -> None:
        """Mark the pages that earlier calls of this episode read."""
        for call in calls:
            if call.name == READ_FILE and call.arguments.keys() >= {"path"}:
                try:
                    self._read.add(checked_path(call.arguments["path"]))
                except InvalidCallError:
                    continue
