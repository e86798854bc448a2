"""Which files of a build context a Dockerfile may copy: `.dockerignore` and its own. Pure."""

import re
from collections.abc import Callable, Iterable

PATTERNS_MAX, PATTERN_CHARACTERS_MAX = 5_000, 1_000


class IgnoreError(ValueError):
    """An ignore file is out of bounds."""


def ignored(text: str) -> Callable[[str], bool]:
    """Return a predicate that is true for ignored paths; the last matching pattern wins.

    Args:
        text: Text of the ignore file: patterns, `!` for exceptions, `#` for comments.

    Raises:
        IgnoreError: There are too many patterns, or one is too long.

    """
    rules: list[tuple[bool, re.Pattern[str]]] = []
    for line in text.removeprefix("\ufeff").splitlines():
        pattern = line.strip()
        if not pattern or line.startswith("#"):
            continue
        is_exception = pattern.startswith("!")
        pattern = pattern.removeprefix("!").strip()
        parts = [part for part in pattern.split("/") if part not in {"", "."}]
        while ".." in parts:
            at = parts.index("..")
            del parts[max(0, at - 1) : at + 1]
        if len(rules) >= PATTERNS_MAX or len(pattern) > PATTERN_CHARACTERS_MAX:
            raise IgnoreError(
                f"expected {PATTERNS_MAX} patterns of {PATTERN_CHARACTERS_MAX} characters at most"
            )
        if parts:
            rules.append((is_exception, re.compile(_expression(parts), re.DOTALL)))

    def is_ignored(path: str) -> bool:
        # A pattern that matches a folder matches all below it.
        names = path.split("/")
        paths = ["/".join(names[: n + 1]) for n in range(len(names))]
        found = False
        for is_exception, rule in rules:
            if found == is_exception and any(map(rule.fullmatch, paths)):
                found = not is_exception
        return found

    return is_ignored


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that match a source with wildcards."""
    parts = [part for part in pattern.split("/") if part not in {"", "."}]
    rule = re.compile(_expression(parts), re.DOTALL)
    return sorted(path for path in paths if rule.fullmatch(path))


def _expression(parts: list[str]) -> str:
    """Return the regular expression of Go's `filepath.Match`, with `**` for any folders.

    Text between two wildcards is matched at its first occurrence, without backtracking (atomic
    groups), so a pattern with many stars does not take exponential time.
    """
    groups: list[list[str]] = [[]]
    for part in parts:
        groups[-1].append(part) if part != "**" else groups.append([])
    texts = ["/".join(map(_name, group)) for group in groups]
    first, *rest = texts
    if not rest:
        return first
    out = f"{first}/" if first else ""
    for text in filter(None, rest[:-1]):
        out += f"(?>(?:|.*?/){text}/)"
    return out + (f"(?:|.*/){rest[-1]}" if rest[-1] else ".*")


def _name(part: str) -> str:
    pieces, at = [""], 0
    while at < len(part):
        char = part[at]
        close = part.find("]", at + 2)
        if char == "*":
            pieces.append("")
        elif char == "?":
            pieces[-1] += "[^/]"
        elif char == "[" and close > 0:
            inside = part[at + 1 : close].replace("\\", "\\\\").replace("[", "\\[")
            pieces[-1] += f"(?!/)[{inside}]"
            at = close
        elif char == "\\" and at + 1 < len(part):
            at += 1
            pieces[-1] += re.escape(part[at])
        else:
            pieces[-1] += re.escape(char)
        at += 1
    first, *rest = pieces
    if not rest:
        return first
    return first + "".join(f"(?>[^/]*?{one})" for one in rest[:-1]) + "[^/]*" + rest[-1]
