"""Cuts source files into pieces that answer a question: definitions, with the lines above them.

By lines and a pattern alone, so it works on any language and on files that do not parse; nothing
that the policy wrote is ever parsed here.
"""

import re
from dataclasses import dataclass

LINES_MAX = 60
LINES_MIN = 3
_DEFINITION = re.compile(
    r"^\s*(?:(?:export|public|private|static|async|pub|abstract|final|default)\s+)*"
    r"(?:def|class|func|fn|function|interface|struct|enum|impl|trait|type|module)\b"
)
_ATTACHED = re.compile(r"^\s*(?:@|#|//|/\*|\*|\"\"\"|$)")


@dataclass(frozen=True)
class Chunk:
    """Some lines of a file."""

    path: str
    first_line: int
    """First line, from 1."""
    text: str

    @property
    def last_line(self) -> int:
        """Inclusive."""
        return self.first_line + self.text.count("\n")


def cut(path: str, text: str) -> list[Chunk]:
    """Return the pieces of a file, in its order; none where it has no line."""
    lines = text.splitlines()
    starts = sorted({0, *(_with_attached(lines, at) for at in _definitions(lines))})
    chunks: list[Chunk] = []
    for first, after in zip(starts, [*starts[1:], len(lines)], strict=True):
        for start in range(first, after, LINES_MAX):
            piece = lines[start : min(after, start + LINES_MAX)]
            if any(line.strip() for line in piece):
                chunks.append(Chunk(path, start + 1, "\n".join(piece)))
    return _merged(chunks)


def _definitions(lines: list[str]) -> list[int]:
    return [index for index, line in enumerate(lines) if _DEFINITION.match(line)]


def _with_attached(lines: list[str], at: int) -> int:
    """Go up over decorators and comments that belong to a definition."""
    first = at
    while first > 0 and lines[first - 1].strip() and _ATTACHED.match(lines[first - 1]):
        first -= 1
    return first


def _merged(chunks: list[Chunk]) -> list[Chunk]:
    """Put pieces of a line or two to the piece before them."""
    kept: list[Chunk] = []
    for chunk in chunks:
        is_short = chunk.text.count("\n") + 1 < LINES_MIN
        if kept and is_short and kept[-1].text.count("\n") + LINES_MIN <= LINES_MAX:
            last = kept.pop()
            gap = "\n" * (chunk.first_line - last.last_line)
            kept.append(Chunk(last.path, last.first_line, f"{last.text}{gap}{chunk.text}"))
        else:
            kept.append(chunk)
    return kept
