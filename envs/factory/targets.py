"""Finds functions of a module from which tasks can be made."""

import ast
import copy
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

LINES_MIN = 3
LINES_MAX = 60
PARAMETERS_MAX = 6
Function = ast.FunctionDef
_SELF = frozenset({"self", "cls"})
_OUTSIDE = frozenset(
    {"os", "open", "socket", "subprocess", "sys", "time", "threading", "asyncio", "input",
     "ctypes", "select", "ssl", "signal", "random", "warnings", "logging", "shutil", "tempfile",
     "io", "print"}
)  # fmt: skip
"""Names of modules and functions with effects outside or with varying results."""


@dataclass(frozen=True)
class Target:
    """One function or method of a module."""

    qualname: str
    """`name` or `Class.name`."""
    node: Function
    owner: ast.ClassDef | None
    """Class of a method."""

    @property
    def digest(self) -> str:
        """See `function_digest`."""
        return function_digest(self.node)

    @property
    def num_lines(self) -> int:
        """Number of lines from `def` to the last one."""
        return (self.node.end_lineno or self.node.lineno) - self.node.lineno + 1

    @property
    def docstring(self) -> str:
        """Docstring, or an empty string."""
        return ast.get_docstring(self.node) or ""


def find_targets(tree: ast.Module) -> Iterator[Target]:
    """Yield functions and undecorated methods of suitable size, in the order of the file."""
    for node in tree.body:
        if isinstance(node, Function) and _fits(node):
            yield Target(node.name, node, None)
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Function) and _fits(member) and not member.decorator_list:
                    qualname = f"{node.name}.{member.name}"
                    yield Target(qualname, member, node)


def promise(target: Target) -> int:
    """Return a score of how well random calls will reveal a function's bugs; 0 is hopeless.

    A function that only computes a value from its parameters scores well; side effects score 0.
    """
    nodes = list(ast.walk(target.node))
    gives = any(
        (isinstance(node, ast.Return) and node.value is not None) or isinstance(node, ast.Yield)
        for node in nodes
    )
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    if not gives or names & _OUTSIDE or not parameters(target.node):
        return 0
    points = 3 + 3 * (">>>" in target.docstring) + bool(target.docstring)
    points -= 2 * (target.owner is not None) + target.node.name.startswith("_")
    points += any(isinstance(node, ast.If | ast.For | ast.While) for node in nodes)
    return max(1, points)


def body_of(function: Function) -> list[ast.stmt]:
    """Return the statements after the docstring."""
    return function.body[1:] if ast.get_docstring(function) is not None else function.body


def parameters(function: Function) -> list[ast.arg]:
    """Return the positional parameters without `self`."""
    given = [*function.args.posonlyargs, *function.args.args]
    return [argument for argument in given if argument.arg not in _SELF]


def function_digest(function: Function) -> str:
    """Return a digest that copies of a function share, whatever their names and docstrings."""
    plain = copy.deepcopy(function)
    plain.body, plain.decorator_list, plain.name = body_of(plain) or plain.body, [], "f"
    names: dict[str, str] = {}
    for node in ast.walk(plain):
        if isinstance(node, ast.arg):
            node.annotation = None
            # Renamed by order of occurrence, so that copies with other names get the same digest.
            node.arg = names.setdefault(node.arg, f"v{len(names)}")
        elif isinstance(node, ast.Name):
            node.id = names.setdefault(node.id, f"v{len(names)}")
    plain.returns = None
    return hashlib.sha256(ast.dump(plain).encode()).hexdigest()[:16]


def _fits(node: Function) -> bool:
    lines = (node.end_lineno or node.lineno) - node.lineno + 1
    is_special = node.name.startswith("__") or node.name.startswith("test")
    return (
        LINES_MIN <= lines <= LINES_MAX
        and not is_special
        and len(parameters(node)) <= PARAMETERS_MAX
        and not any(argument.arg not in _SELF for argument in _required_keywords(node))
        and bool(body_of(node))
    )


def _required_keywords(node: Function) -> list[ast.arg]:
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return [argument for argument, default in pairs if default is None]
