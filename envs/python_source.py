"""Foreign Python source, parsed: the only place where text that somebody else wrote is parsed.

Whatever is wrong with it is one typed error, and what comes back can be walked recursively: the
parser's own limits differ with the version and the stack, these do not.
"""

import ast
import io
import tokenize

from penstock.messages.errors import PenstockError

BYTES_MAX = 1 << 20
NESTING_MAX = 200
"""Levels of the syntax tree; the standard library's deepest file has fewer than 60."""


class PythonSourceError(PenstockError, ValueError):
    """A text is no Python that may be parsed; the text says why."""


def parse_python(source: str | bytes) -> ast.Module:
    """Return the syntax tree of a file as an interpreter of this version would read it.

    Raises:
        PythonSourceError: It is no UTF-8 (an encoding line may not say otherwise), has a zero byte,
            is larger than `BYTES_MAX`, nests deeper than `NESTING_MAX`, or does not parse.

    """
    text = _as_text(source)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise PythonSourceError(f"does not parse: {_in_short(error)}") from None
    except (RecursionError, MemoryError):
        raise PythonSourceError("nests too deep to be parsed") from None
    _check_nesting(tree)
    return tree


def _as_text(source: str | bytes) -> str:
    try:
        data = source.encode() if isinstance(source, str) else source
        text = data.decode()
    except UnicodeError as error:
        raise PythonSourceError(f"expected UTF-8: {_in_short(error)}") from None
    if len(data) > BYTES_MAX:
        raise PythonSourceError(f"{len(data)} bytes, at most {BYTES_MAX} are parsed")
    if "\0" in text:
        raise PythonSourceError("has a zero byte")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
    except SyntaxError as error:
        raise PythonSourceError(f"encoding: {_in_short(error)}") from None
    if encoding not in {"utf-8", "utf-8-sig"}:
        raise PythonSourceError(f"expected UTF-8, its encoding line says {encoding}")
    return text.removeprefix("\ufeff")


def _check_nesting(tree: ast.Module) -> None:
    level: list[ast.AST] = [tree]
    for _ in range(NESTING_MAX):
        level = [child for node in level for child in ast.iter_child_nodes(node)]
        if not level:
            return
    raise PythonSourceError(f"nests deeper than {NESTING_MAX} levels")


def _in_short(error: Exception) -> str:
    return str(error)[:200]
