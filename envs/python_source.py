"""Parses untrusted Python source; no other module calls `ast.parse` on text that others wrote.

Any defect of the source raises one typed error, and the returned tree is shallow enough to be
walked recursively. CPython's own limits vary with its version and the stack, the limits here do
not.
"""

import ast
import io
import tokenize

from penstock.messages.errors import PenstockError

BYTES_MAX = 1 << 20
NESTING_MAX = 200
"""Levels of the syntax tree; the standard library's deepest file has fewer than 60."""


class PythonSourceError(PenstockError, ValueError):
    """A source is not Python that may be parsed; the error says why."""


def parse_python(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a file, as this version of the interpreter would read it.

    Raises:
        PythonSourceError: The source is not UTF-8 or declares another encoding, has a zero byte, is
            larger than `BYTES_MAX`, nests deeper than `NESTING_MAX`, or does not parse.

    """
    text = _as_text(source)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise PythonSourceError(f"does not parse: {_abbreviate(error)}") from None
    except (RecursionError, MemoryError):
        # The parser gives up on deep nesting in either way before a tree exists to be measured.
        raise PythonSourceError("nests too deep to be parsed") from None
    _check_nesting(tree)
    return tree


def _as_text(source: str | bytes) -> str:
    try:
        data = source.encode() if isinstance(source, str) else source
        text = data.decode()
    except UnicodeError as error:
        raise PythonSourceError(f"expected UTF-8: {_abbreviate(error)}") from None
    if len(data) > BYTES_MAX:
        raise PythonSourceError(f"has {len(data)} bytes, expected at most {BYTES_MAX}")
    if "\0" in text:
        raise PythonSourceError("has a zero byte")
    # `ast.parse` ignores the encoding line of a str, but an interpreter that runs the file obeys
    # it.
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise PythonSourceError(f"encoding: {_abbreviate(error)}") from None
    if encoding not in {"utf-8", "utf-8-sig"}:
        raise PythonSourceError(f"expected UTF-8, its encoding line says {encoding}")
    return text.removeprefix("\ufeff")


def _check_nesting(tree: ast.Module) -> None:
    # Level by level: a recursive walk could overflow on exactly the trees that must be refused.
    level: list[ast.AST] = [tree]
    for _ in range(NESTING_MAX):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise PythonSourceError(f"nests deeper than {NESTING_MAX} levels")


def _abbreviate(error: Exception) -> str:
    return str(error)[:200]
