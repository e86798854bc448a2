"""A template made concrete: its source under given names, its bugs, the calls that reveal them."""

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from string import Template as Slots
from typing import Any

from penstock.envs.factory.mutation_operators import Edit, applied, edits, variables
from penstock.envs.python_source import parse_python

from .dry_run import load, outcome
from .names import draw_function_name, draw_variables
from .template import KINDS, Template

_NUM_CANDIDATES = 60
_NUM_CASES_MIN = 6

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
class CallCase:
    """One call and what it must return."""

    arguments: tuple[Any, ...]
    expected: str
    """repr of the result."""


@dataclass(frozen=True)
class Function:
    """One template with one of its variants."""

    template: Template
    variant: int
    canonical: str = field(init=False)
    """Source with the slots themselves as names."""

    def __post_init__(self) -> None:
        """Render once with canonical names."""
        names = {slot: slot for slot in self._slots}
        object.__setattr__(self, "canonical", self.render("f", names))

    @property
    def _slots(self) -> list[str]:
        return [*self.template.params, *self.template.local_slots]

    @property
    def name(self) -> str:
        """Family and variant, e.g. `bisect.1`."""
        return f"{self.template.family}.{self.variant}"

    def render(self, function_name: str, names: dict[str, str]) -> str:
        """Return the source under these names, formatted as `ast.unparse` does."""
        words = self.template.variants[self.variant] | names
        body = Slots(self.template.body).substitute(words)
        parameters = ", ".join(names[slot] for slot in self.template.params)
        indented = "\n".join(f"    {line}" for line in body.splitlines())
        return ast.unparse(parse_python(f"def {function_name}({parameters}):\n{indented}\n"))

    def draw_names(self, rng: random.Random, *, heldout: bool) -> tuple[str, dict[str, str]]:
        """Return a function name of the asked split, and names for the variables."""
        function_name = draw_function_name(rng, self.template.verbs, heldout=heldout)
        return function_name, draw_variables(rng, self._slots, self.template.params)

    @cached_property
    def cases(self) -> list[CallCase]:
        """Distinct calls with what the right function returns; always the same."""
        rng = random.Random(self.name)
        function = load(self.canonical, "f")
        found: dict[str, CallCase] = {}
        for _ in range(_NUM_CANDIDATES):
            arguments = tuple(KINDS[kind](rng) for kind in self.template.params.values())
            is_value, result = outcome(function, arguments)
            if is_value:
                found.setdefault(repr(arguments), CallCase(arguments, result))
        return list(found.values())

    @cached_property
    def killers(self) -> dict[str, list[int]]:
        """Site of each real bug -> indexes of the cases that it fails; harmless edits are left out.

        The site names do not depend on how the variables are called.
        """
        found = {}
        for mutation in mutations(self.canonical):
            failed = self._failed(mutation)
            if failed:
                found[mutation.site] = failed
        return found

    def _failed(self, mutation: Mutation) -> list[int]:
        function = load(mutation.source, "f")
        results = [outcome(function, case.arguments) for case in self.cases]
        return [
            index
            for index, (case, result) in enumerate(zip(self.cases, results, strict=True))
            if result != (True, case.expected)
        ]

    def hidden_cases(self, rng: random.Random) -> list[CallCase]:
        """Return cases that together fail every known bug of this function."""
        chosen: list[int] = []
        for failed in self.killers.values():
            if not set(failed) & set(chosen):
                chosen.append(rng.choice(failed))
        spare = [index for index in range(len(self.cases)) if index not in chosen]
        num_more = max(0, min(_NUM_CASES_MIN - len(chosen), len(spare)))
        return [self.cases[index] for index in sorted([*chosen, *rng.sample(spare, num_more)])]


def mutations(source: str) -> list[Mutation]:
    """Return all bugs of a function, in a fixed order.

    Args:
        source: one `def` with a docstring, as `ast.unparse` writes it.

    """
    tree = parse_python(source)
    found = []
    for index, edit in enumerate(_edits(tree)):
        with applied(edit):
            found.append(Mutation(edit.category, f"{edit.category}{index}", ast.unparse(tree)))
    return [*found, Mutation(BODY, BODY, _without_body(tree))]


def mutate(source: str, site: str) -> str:
    """Return a function with the bug of one site, as `mutations` would."""
    tree = parse_python(source)
    if site == BODY:
        return _without_body(tree)
    edit = list(_edits(tree))[int(site.lstrip(_LETTERS))]
    with applied(edit):
        return ast.unparse(tree)


def sites(source: str) -> list[str]:
    """Return the sites of all bugs but the missing body."""
    edits = enumerate(_edits(parse_python(source)))
    return [f"{edit.category}{index}" for index, edit in edits]


def _without_body(tree: ast.Module) -> str:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    docstring = function.body[0]
    missing = parse_python("raise NotImplementedError").body
    function.body = [docstring, *missing]
    return ast.unparse(tree)


def _edits(tree: ast.Module) -> Iterator[Edit]:
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    return edits(function.body[1:], variables(function))
