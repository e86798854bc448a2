"""Small bugs: edits of a function's syntax tree, applied to the text of its module.

The text of a changed node is replaced in place, so that comments and layout stay. The result is
parsed again and must be the intended tree; edits that cannot be written in place are dropped.
"""

import ast
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from penstock.envs.factory.targets import Target, body_of
from penstock.envs.python_source import PythonSourceError, parse_python

_OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add, ast.FloorDiv),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mod,),  # no product: in a loop it could grow without bound
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
}
_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.NotIn: (ast.In,),
}
_NAMES: dict[str, tuple[str, ...]] = {
    "max": ("min",),
    "min": ("max",),
    "sum": ("max",),
    "all": ("any",),
    "abs": ("int",),
    "upper": ("lower",),
    "lower": ("upper",),
    "strip": ("rstrip",),
    "lstrip": ("rstrip", "strip"),
    "rstrip": ("lstrip", "strip"),
    "startswith": ("endswith",),
    "endswith": ("startswith",),
    "ljust": ("rjust", "center"),
    "rjust": ("ljust", "center"),
    "partition": ("rpartition",),
    "rpartition": ("partition",),
    "capitalize": ("upper", "lower"),
    "zfill": ("ljust",),
}


@dataclass(frozen=True)
class Edit:
    """A change of one or more fields of a syntax tree."""

    category: str
    changes: tuple[tuple[ast.AST, str, object], ...]
    """(node, field, new value)."""


def _edit(category: str, node: ast.AST, field: str, value: object) -> Edit:
    return Edit(category, ((node, field, value),))


@contextmanager
def applied(edit: Edit) -> Iterator[None]:
    """Apply an edit inside the block."""
    originals = [(node, field, getattr(node, field)) for node, field, _ in edit.changes]
    for node, field, value in edit.changes:
        setattr(node, field, value)
    try:
        yield
    finally:
        for node, field, value in originals:
            setattr(node, field, value)


def edits(body: list[ast.stmt], names: list[str]) -> Iterator[Edit]:
    """Yield every edit of some statements, in a deterministic order.

    Args:
        body: Statements without the docstring.
        names: Variables that may replace each other.

    """
    statements = ast.Module(body=body, type_ignores=[])
    for node in ast.walk(statements):
        yield from _operator_edits(node)
        yield from _comparison_edits(node)
        yield from _constant_edits(node)
        yield from _call_edits(node)
        yield from _argument_edits(node, names)


def variables(function: ast.FunctionDef) -> list[str]:
    """Return the parameters and the assigned names of a function, in order."""
    names = [argument.arg for argument in function.args.args]
    stored = [
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    ]
    return list(dict.fromkeys(names + stored))


def _operator_edits(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.BinOp):
        for other in _OPERATORS.get(type(node.op), ()):
            yield _edit("operator", node, "op", other())
    if isinstance(node, ast.BoolOp):
        other_bool = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield _edit("operator", node, "op", other_bool)


def _comparison_edits(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for other in _COMPARISONS.get(type(op), ()):
                ops = [*node.ops[:index], other(), *node.ops[index + 1 :]]
                yield _edit("comparison", node, "ops", ops)


def _constant_edits(node: ast.AST) -> Iterator[Edit]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield _edit("constant", node, "value", not node.value)
    elif isinstance(node.value, int):
        yield _edit("constant", node, "value", node.value + 1)
        if node.value > 0:
            yield _edit("constant", node, "value", node.value - 1)


def _call_edits(node: ast.AST) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        for other in _NAMES.get(node.func.id, ()):
            yield _edit("call", node.func, "id", other)
    if isinstance(node, ast.Attribute):
        for other in _NAMES.get(node.attr, ()):
            yield _edit("call", node, "attr", other)


def _argument_edits(node: ast.AST, names: list[str]) -> Iterator[Edit]:
    if isinstance(node, ast.Call) and len(node.args) == 2:
        yield _edit("argument", node, "args", node.args[::-1])
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        receiver = node.func.value
        if len(node.args) == 1 and isinstance(receiver, ast.Name):
            swap = ((node.func, "value", node.args[0]), (node, "args", [receiver]))
            yield Edit("argument", swap)
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in names:
        others = [name for name in names if name != node.id]
        for other in others[:2]:
            yield _edit("argument", node, "id", other)


MISSING = "raise NotImplementedError"
_DROPPED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Return, ast.Continue, ast.Break)


@dataclass(frozen=True)
class Bug:
    """A module with one bug."""

    kind: str
    """Category of an edit, e.g. `comparison`, or `condition` or `statement`."""
    source: str


class ModuleText:
    """A module's source, addressed by `ast` positions, and one function in it."""

    def __init__(self, source: str, target: Target) -> None:
        # Column offsets of `ast` count UTF-8 bytes, not characters.
        self._data = source.encode()
        self._starts = [0]
        for line in self._data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        node = target.node
        self._first_line = node.lineno
        self._range = self._starts[node.lineno - 1], self._starts[node.end_lineno or node.lineno]

    def span(self, node: ast.AST) -> tuple[int, int]:
        """Return the byte range of a node."""
        first = self._starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
        last = self._starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
        return first, last

    def text(self, node: ast.AST) -> str:
        """Return the text of a node."""
        first, last = self.span(node)
        return self._data[first:last].decode()

    def replaced(self, first: int, last: int, text: str) -> str:
        """Return the module with another text in a byte range."""
        return (self._data[:first] + text.encode() + self._data[last:]).decode()

    def parsed(self, first: int, last: int, text: str) -> ast.Module | None:
        """Parse the function with another text in a byte range; lines are those of the module."""
        start, end = self._range
        function = (self._data[start:first] + text.encode() + self._data[last:end]).decode()
        is_indented = function[:1].isspace()
        try:
            tree = parse_python(f"if 1:\n{function}" if is_indented else function)
        except PythonSourceError:
            return None
        return ast.increment_lineno(tree, self._first_line - 1 - is_indented)


def draw_bugs(source: str, target: Target, rng: random.Random, num_max: int) -> list[Bug]:
    """Draw up to `num_max` distinct bugs of a function, its kinds in turn."""
    module = ModuleText(source, target)
    by_kind: dict[str, list[Callable[[], str | None]]] = {}
    for kind, write in _all_bugs(module, target):
        by_kind.setdefault(kind, []).append(write)
    for writers in by_kind.values():
        rng.shuffle(writers)
    chosen: dict[str, Bug] = {}
    # Kinds take turns, or the most frequent kind of edit would dominate.
    for turn in range(num_max):
        for kind in sorted(by_kind):
            if turn < len(by_kind[kind]) and len(chosen) < num_max:
                changed = by_kind[kind][turn]()
                if changed is not None:
                    chosen.setdefault(changed, Bug(kind, changed))
    return list(chosen.values())


def without_body(source: str, target: Target) -> str:
    """Return the module with the function's statements after its docstring removed."""
    module = ModuleText(source, target)
    body = body_of(target.node)
    first, last = module.span(body[0])[0], module.span(body[-1])[1]
    return module.replaced(first, last, MISSING)


def _all_bugs(module: ModuleText, target: Target) -> Iterator[tuple[str, Callable[[], str | None]]]:
    """Yield (kind, function that writes the module with the bug)."""
    # Functions, because writing parses the target and most bugs are never drawn.
    body = body_of(target.node)
    for edit in edits(body, variables(target.node)):
        yield edit.category, partial(_written_in_place, module, edit)
    for node in ast.walk(ast.Module(body=body, type_ignores=[])):
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield (
                "condition",
                partial(_replaced, module, node.test, f"not ({module.text(node.test)})"),
            )
        elif isinstance(node, _DROPPED) and len(body) > 1:
            yield "statement", partial(_replaced, module, node, "pass")


def _replaced(module: ModuleText, node: ast.AST, text: str) -> str | None:
    span = module.span(node)
    return module.replaced(*span, text) if module.parsed(*span, text) is not None else None


def _written_in_place(module: ModuleText, edit: Edit) -> str | None:
    placed = [node for node, _, _ in edit.changes if hasattr(node, "lineno")]
    if not placed:
        return None
    # The outermost changed node contains all the others.
    outer = max(placed, key=lambda node: module.span(node)[1] - module.span(node)[0])
    span = module.span(outer)
    with applied(edit):
        text, meant = ast.unparse(outer), ast.dump(outer)
    # With parentheses where precedence would otherwise change the tree.
    for written in (text, f"({text})"):
        tree = module.parsed(*span, written)
        if tree is not None and _holds(tree, meant, outer):
            return module.replaced(*span, written)
    return None


def _holds(tree: ast.Module, meant: str, outer: ast.AST) -> bool:
    line = outer.lineno  # type: ignore[attr-defined]
    return any(
        isinstance(node, type(outer)) and node.lineno == line and ast.dump(node) == meant  # type: ignore[attr-defined]
        for node in ast.walk(tree)
    )
