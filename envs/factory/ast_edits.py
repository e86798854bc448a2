"""One bug at a time: small edits of a function's syntax tree, named by category and place."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

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
BODY = "body"
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
BUG_CATEGORIES = ("operator", "comparison", "constant", "call", "argument", BODY)


@dataclass(frozen=True)
class Mutation:
    """A function with one bug."""

    category: str
    site: str
    """Stable name of the place and the change, the same whatever the variables are called."""
    source: str


@dataclass(frozen=True)
class Edit:
    """Fields of a tree's nodes that change together."""

    category: str
    changes: tuple[tuple[ast.AST, str, object], ...]
    """(node, field, new value), made together."""


def _edit(category: str, node: ast.AST, field: str, value: object) -> Edit:
    return Edit(category, ((node, field, value),))


def mutations(source: str) -> list[Mutation]:
    """Return all bugs of a function, in a fixed order.

    Args:
        source: one `def` with a docstring, as `ast.unparse` writes it.

    """
    tree = ast.parse(source)
    found = []
    for index, edit in enumerate(_edits(tree)):
        originals = [(node, field, getattr(node, field)) for node, field, _ in edit.changes]
        apply(edit.changes)
        found.append(Mutation(edit.category, f"{edit.category}{index}", ast.unparse(tree)))
        apply(originals)
    return [*found, Mutation(BODY, BODY, _without_body(tree))]


def mutate(source: str, site: str) -> str:
    """Return a function with the bug of one site, as `mutations` would."""
    tree = ast.parse(source)
    if site == BODY:
        return _without_body(tree)
    edit = list(_edits(tree))[int(site.lstrip(_LETTERS))]
    apply(edit.changes)
    return ast.unparse(tree)


def sites(source: str) -> list[str]:
    """Return the sites of all bugs but the missing body."""
    edits = enumerate(_edits(ast.parse(source)))
    return [f"{edit.category}{index}" for index, edit in edits]


def apply(changes: Iterable[tuple[ast.AST, str, object]]) -> None:
    """Set each field of each node."""
    for node, field, value in changes:
        setattr(node, field, value)


def _without_body(tree: ast.Module) -> str:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    docstring = function.body[0]
    missing = ast.parse("raise NotImplementedError").body
    function.body = [docstring, *missing]
    return ast.unparse(tree)


def _edits(tree: ast.Module) -> Iterator[Edit]:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return edits(function.body[1:], variables(function))


def edits(body: list[ast.stmt], names: list[str]) -> Iterator[Edit]:
    """Yield every edit of some statements, in a fixed order.

    Args:
        body: without the docstring.
        names: variables, of which one may stand in for another.

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
