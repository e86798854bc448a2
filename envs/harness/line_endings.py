"""Line endings of files that agents edit: shown as lines, found as shown, and kept as they were.

`read_file` shows lines, so a policy cannot see whether they end in LF, CRLF or CR. Its edits are
found whatever the endings, and what it writes gets the endings of the lines it replaces.
"""

import re
from itertools import chain, repeat

_ENDING = re.compile(r"\r\n|\r|\n")


def split_lines(text: str) -> list[str]:
    """Return the lines of a text without their endings; unlike `splitlines`, only of these three.

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

    Spans do not overlap. Where `shown` occurs with its very endings, only such places count.
    """
    # Never half of a CRLF.
    exact = f"(?:(?<!\r)|(?!\n)){re.escape(shown)}(?:(?<!\r)|(?!\n))"
    if found := [match.span() for match in re.finditer(exact, text)]:
        return found
    pattern = f"(?:{_ENDING.pattern})".join(map(re.escape, _ENDING.split(shown)))
    return [match.span() for match in re.finditer(pattern, text)]


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
        # Line by line: a file with mixed endings keeps them where lines stay.
        endings = chain(within, repeat(near[0]))
        new = re.sub("\n", lambda _: next(endings), new)
    return text[:start] + new + text[end:]
