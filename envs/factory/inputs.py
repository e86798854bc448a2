"""Draws calls of a function from its signature, its doctests and the literals around it.

A call is text, `name(arguments)` or `Class(arguments).method(arguments)`. Nothing is imported or
run here; a machine finds out which calls are informative.
"""

import ast
import doctest
import random
from collections.abc import Sequence

from penstock.envs.factory.targets import Function, Target, parameters
from penstock.envs.python_source import PythonSourceError, parse_python

LITERAL_CHARACTERS_MAX = 80
_MINED_MAX = 200
_DOCTEST_CALLS_MAX = 12
_POOLS: dict[str, tuple[str, ...]] = {
    "int": ("0", "1", "2", "3", "5", "7", "10", "12", "16", "-1", "-3", "100", "255", "1024"),
    "float": ("0.0", "1.0", "0.5", "2.5", "-1.5", "3.25", "10.0", "0.1"),
    "str": (
        "''", "'a'", "'abc'", "'Hello World'", "'a,b;c'", "'x=1&y=2'", "'a/b/c.txt'", "'  x  '",
        "'aXbX'", "'3.14'", "'42'", "'one two  three'", "'<b>&amp;</b>'", "'line\\nnext'",
        "'a.b.c'",
        "'user@example.org'", "'http://example.org/p?q=1#f'", "'key: value'", "'1.2.3rc1'",
        "'Content-Type'", "'été'",
    ),
    "bytes": ("b''", "b'abc'", "b'\\x00\\xff'", "b'hello world'", "b'a=1\\r\\n'"),
    "bool": ("True", "False"),
    "ints": ("[]", "[1]", "[3, 1, 2]", "[1, 2, 2, 3]", "[5, -1, 0, 5]", "list(range(8))"),
    "floats": ("[1.0, 2.5, 4.0]", "[0.5, 0.5, 1.5, 3.0]", "[2.0]"),
    "strs": ("['a', 'b']", "['x', 'yy', 'zzz']", "['b', 'a', 'c', 'a']", "['a/b', 'a/c']"),
    "pairs": ("[('a', 1), ('b', 2)]", "[(1, 2), (2, 3), (3, 1)]"),
    "tuple": ("(1, 2)", "(0, 0)", "(1, 2, 3)", "('a', 'b')"),
    "dict": ("{}", "{'a': 1}", "{'a': 1, 'b': [2]}", "{1: 2, 2: 3}"),
    "set": ("{1, 2, 3}", "{2, 5}"),
    "none": ("None",),
    "function": ("len", "str", "abs", "int", "repr"),
    "graph": ("{1: [2, 3], 2: [4], 3: [4], 4: []}", "{'a': {'b'}, 'b': set()}"),
}  # fmt: skip
_BY_NAME: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("string", "text", "name", "path", "url", "str", "line", "pattern", "word", "prefix", "suffix",
      "sep", "title", "header", "fmt", "format", "spec", "key", "tag", "lang", "msg", "domain",
      "host", "label", "ver", "encoding", "filename", "token", "src", "code", "quote", "uri"),
     ("str",)),
    (("num", "count", "size", "width", "length", "index", "pos", "start", "stop", "end", "limit",
      "year", "month", "day", "hour", "level", "depth", "offset", "digits", "base", "total", "max",
      "min", "bits", "port", "code", "step", "indent", "hi", "lo", "prec", "exp", "man"),
     ("int", "int", "int", "float")),
    (("seq", "list", "items", "iter", "values", "data", "lines", "args", "parts", "words",
      "population", "heap", "keys", "rows", "xs", "points", "nodes", "edges"),
     ("ints", "strs", "floats", "pairs", "str")),
    (("bytes", "buf", "payload", "octets", "chunk", "blob", "raw"), ("bytes", "str")),
    (("func", "callback", "predicate", "factory", "fn"), ("function",)),
    (("dict", "map", "graph", "table", "attrs", "options"), ("dict", "graph")),
    (("flag", "strict", "is_", "reverse", "ignore", "allow"), ("bool",)),
)  # fmt: skip
_ONE_LETTER = {
    "s": ("str",), "n": ("int",), "m": ("int",), "k": ("int",),
    "x": ("int", "float", "ints", "str"),
    "y": ("int", "float", "ints"), "a": ("ints", "int", "str"), "b": ("bytes", "int", "str"),
    "p": ("str", "float"), "c": ("str", "int"), "r": ("float", "int"), "g": ("float",),
    "h": ("float",), "l": ("float", "ints"), "v": ("float", "str"), "d": ("dict", "int"),
    "i": ("int",), "j": ("int",), "f": ("function", "float"),
}  # fmt: skip
_ANY = ("int", "str", "ints", "strs", "float", "bytes", "dict", "tuple", "none", "pairs")
_ANNOTATED = {
    "int": ("int",), "str": ("str",), "bytes": ("bytes",), "float": ("float", "int"),
    "bool": ("bool",), "dict": ("dict",), "list": ("ints", "strs"), "tuple": ("tuple",),
    "set": ("set",), "Iterable": ("ints", "strs"), "Sequence": ("ints", "strs"),
    "Mapping": ("dict",), "Callable": ("function",),
}  # fmt: skip


class CallWriter:
    """Writes calls of one module's functions."""

    def __init__(self, tree: ast.Module, rng: random.Random) -> None:
        self._rng = rng
        # Literals of a module are often valid arguments of its functions.
        self._mined = _mined_literals(tree)

    def calls(self, target: Target, num: int) -> list[str]:
        """Return up to `num` distinct calls: those of doctests first, then random ones."""
        found = dict.fromkeys(doctest_calls(target)[:_DOCTEST_CALLS_MAX])
        for _ in range(4 * num):  # Bounded: a function may have few distinct calls.
            if len(found) >= num:
                break
            found[self._call(target)] = None
        return list(found)[:num]

    def _call(self, target: Target) -> str:
        arguments = self._arguments(target.node)
        if target.owner is None:
            return f"{target.node.name}({arguments})"
        makers = [m for m in target.owner.body if isinstance(m, Function) and m.name == "__init__"]
        if makers:
            made = self._arguments(makers[0])
        else:  # `__init__` is inherited: try none, or one of any kind.
            made = self._rng.choice(["", self._value(_ANY), self._value(("str",))])
        return f"{target.owner.name}({made}).{target.node.name}({arguments})"

    def _arguments(self, function: Function) -> str:
        given = parameters(function)
        num_optional = len(function.args.defaults)
        num_required = max(0, len(given) - num_optional)
        taken = given[: num_required + self._rng.randint(0, len(given) - num_required)]
        values = [self._value(_pools(argument)) for argument in taken]
        if function.args.vararg is not None and not taken:
            values = [self._value(_ANY) for _ in range(self._rng.randint(1, 3))]
        return ", ".join(values)

    def _value(self, pools: Sequence[str]) -> str:
        pool = self._rng.choice(pools)
        mined = self._mined.get(pool)
        # Not always: a module's literals cover only the cases that its author thought of.
        if mined and self._rng.random() < 0.4:
            return self._rng.choice(mined)
        return self._rng.choice(_POOLS[pool])


def familiarity(target: Target) -> int:
    """Return a score: higher for required parameters whose values can be guessed."""
    given = parameters(target.node)
    required = given[: max(1, len(given) - len(target.node.args.defaults))]
    return sum(1 if _pools(argument) is not _ANY else -2 for argument in required)


def doctest_calls(target: Target) -> list[str]:
    """Return the expressions of a docstring's examples that call the function."""
    if ">>>" not in target.docstring:
        return []
    try:
        examples = doctest.DocTestParser().get_examples(target.docstring)
    except ValueError:
        return []
    found = []
    for example in examples:
        source = example.source.strip()
        if target.node.name in source and "\n" not in source and _is_expression(source):
            found.append(source)
    return found


def _pools(argument: ast.arg) -> Sequence[str]:
    if argument.annotation is not None:
        # Annotations first: they are more reliable than names.
        words = {node.id for node in ast.walk(argument.annotation) if isinstance(node, ast.Name)}
        annotated = [pool for word in sorted(words) for pool in _ANNOTATED.get(word, ())]
        if annotated:
            return annotated
    if argument.arg in _ONE_LETTER:
        return _ONE_LETTER[argument.arg]
    name = argument.arg.lower()
    for words_of, pools in _BY_NAME:
        if any(word in name for word in words_of):
            return pools
    return _ANY


def _mined_literals(tree: ast.Module) -> dict[str, list[str]]:
    mined: dict[str, dict[str, None]] = {"int": {}, "str": {}, "bytes": {}, "float": {}}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and type(node.value).__name__ in mined:
            text = repr(node.value)
            if len(text) <= LITERAL_CHARACTERS_MAX:
                mined[type(node.value).__name__][text] = None
    return {kind: list(found)[:_MINED_MAX] for kind, found in mined.items()}


def _is_expression(source: str) -> bool:
    try:
        tree = parse_python(source)
    except PythonSourceError:
        return False
    return len(tree.body) == 1 and isinstance(tree.body[0], ast.Expr)
