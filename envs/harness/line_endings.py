"""Line endings of files that agents edit: hidden from the policy and preserved by its edits.

`read_file` shows lines, so a policy cannot see whether they end in LF, CRLF or CR. Its edits match
regardless of endings, and new text gets the endings of the lines that it replaces.
"""

import bisect
import itertools
import re
from collections.abc import Iterator
from itertools import chain, repeat

_ENDING = re.compile(r"\r\n|\r|\n")


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without endings; unlike `splitlines`, only these three count.

    `splitlines` also splits at form feeds and other separators, which editors, `grep` and compilers
    count as part of a line.
    """
    lines = _ENDING.split(text)
    return lines[:-1] if not lines[-1] else lines


def only_ending(text: str) -> str | None:
    """Return the ending that all lines of a text share; None if it has none or several."""
    found = set(_ENDING.findall(text))
    return found.pop() if len(found) == 1 else None


def with_ending(text: str, ending: str) -> str:
    """Return a text in which every line ends in `ending`."""
    return _ENDING.sub(ending, text)


def find_shown(text: str, shown: str) -> list[tuple[int, int]]:
    """Return the spans of a text that look like `shown`, whatever their line endings.

    Spans do not overlap. If `shown` occurs with its own endings, only those places count.
    """
    exact = [at for at in _places(text, shown) if not _splits(text, at, at + len(shown))]
    if exact:
        return [(at, at + len(shown)) for at in exact]
    # Search in a text with a single kind of ending, because a pattern of all endings takes
    # quadratic time.
    parts = _ENDING.split(text)
    wanted = with_ending(shown, "\n")
    starts, plain = _line_starts(text), "\n".join(parts)
    plain_starts = [0, *itertools.accumulate(len(part) + 1 for part in parts)]

    def place(at: int) -> int:
        line = bisect.bisect_right(plain_starts, at) - 1
        return starts[line] + at - plain_starts[line]

    return [(place(at), place(at + len(wanted))) for at in _places(plain, wanted)]


def _line_starts(text: str) -> list[int]:
    return [0, *(found.end() for found in _ENDING.finditer(text))]


def _places(text: str, wanted: str) -> Iterator[int]:
    """Yield the places where a text occurs, without overlaps."""
    at = text.find(wanted)
    while at >= 0:
        yield at
        at = text.find(wanted, at + max(1, len(wanted)))


def _splits(text: str, start: int, end: int) -> bool:
    """Return whether a span begins or ends within a CRLF."""
    return any(text[at - 1 : at + 1] == "\r\n" for at in (start, end) if 0 < at < len(text))


def replaced(text: str, span: tuple[int, int], old: str, new: str) -> str:
    """Return a text with a span replaced, in the line endings of the lines around it.

    Args:
        text: Text of the file.
        span: Start and end of what is replaced.
        old: What the policy asked to replace.
        new: What replaces it. If it or `old` has a CR, the policy chose the endings itself.

    """
    start, end = span
    if "\r" not in old + new:
        after = _ENDING.search(text, end) if "\n" not in text[start:end] else None
        before = _ENDING.findall(text, 0, start)[-1:] if after is None else [after[0]]
        within = _ENDING.findall(text, start, end)
        near = within[-1:] or before or ["\n"]
        # Line by line, so unchanged lines of a file with mixed endings keep theirs.
        endings = chain(within, repeat(near[0]))
        new = re.sub("\n", lambda _: next(endings), new)
    return text[:start] + new + text[end:]
