"""Bug injection and feature deletion: makes tasks from the functions of a module.

For each function: draw calls, record the original's results (twice, under different hash seeds),
draw bugs, find in the same machine which calls each bug changes, and keep the subtlest bug, which
changes the fewest calls. A function with a docstring also gives a task without its body.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from functools import lru_cache

import msgspec

from penstock.envs.factory.drafting import FEATURE, write_candidate
from penstock.envs.factory.inputs import CallWriter, familiarity
from penstock.envs.factory.lab import MachineLab
from penstock.envs.factory.modules import Module, needed_files
from penstock.envs.factory.mutation_operators import draw_bugs, without_body
from penstock.envs.factory.plans import TaskPlan
from penstock.envs.factory.recording import TriedChange, record, try_changes
from penstock.envs.factory.targets import Target, find_targets, promise
from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.envs.tasks.source import Rejection, TaskCandidate, TaskRejectedError

_CALLS_DRAWN = 48
_POINTS_MIN = 3
_HANDFUL = 12
"""Modules whose plans are sorted together; all modules at once would take long to parse."""
_BUGS_TRIED = 6


class InjectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of bug injection."""

    seed: int = 0
    bugs_per_function: int = 3
    """Maximum bugs per function, each of a different kind."""
    features: bool = True
    functions_per_module: int = 8


class InjectedSource:
    """Tasks from a list of modules, in a random order."""

    def __init__(self, name: str, modules: Sequence[Module], config: InjectConfig) -> None:
        self.name = name
        self._modules, self._config = list(modules), config
        random.Random(f"{name}/{config.seed}").shuffle(self._modules)

    def plans(self) -> Iterator[TaskPlan]:
        """Yield one plan per function, the most promising ones of each few modules first."""
        for start in range(0, len(self._modules), _HANDFUL):
            plans = [
                plan
                for module in self._modules[start : start + _HANDFUL]
                for plan in _module_plans(self.name, module, self._config)
            ]
            yield from sorted(plans, key=lambda plan: -plan.promise)


def _module_plans(source_name: str, module: Module, config: InjectConfig) -> list["FunctionPlan"]:
    try:
        tree = parsed(module)
    except TaskRejectedError:
        return []
    rng = random.Random(f"{config.seed}/{module.name}")
    plans = [
        FunctionPlan(source_name, module, target.qualname, points, config)
        for target in find_targets(tree)
        # Their C versions are importable in the machine, e.g. `_json`, and give the right answers.
        if not (module.prefix and target.node.name.startswith("py_"))
        if promise(target) and (points := promise(target) + familiarity(target)) >= _POINTS_MIN
    ]
    rng.shuffle(plans)
    return sorted(plans, key=lambda plan: -plan.promise)[: config.functions_per_module]


@lru_cache(maxsize=_HANDFUL)
def parsed(module: Module) -> ast.Module:
    """Parse a module.

    Raises:
        TaskRejectedError: The module does not parse, or is too large.

    """
    try:
        return parse_python(module.read())
    except PythonSourceError as error:
        raise TaskRejectedError(Rejection.NOT_PARSED, f"{module.file}: {error}") from error


class FunctionPlan:
    """One function of a module."""

    def __init__(
        self,
        source_name: str,
        module: Module,
        qualname: str,
        points: int,
        config: InjectConfig,
    ) -> None:
        self.name = f"{module.name}:{qualname}"
        self.promise = points
        self._source_name, self._module, self._config = source_name, module, config
        self._qualname = qualname
        self._rng = random.Random(f"{config.seed}/{self.name}")

    async def draft(self, lab: MachineLab) -> list[TaskCandidate]:
        """Record the original, try bugs, and make a task of the subtlest visible ones."""
        module, tree = self._module, parsed(self._module)
        target = next(one for one in find_targets(tree) if one.qualname == self._qualname)
        files = needed_files(module)
        calls = CallWriter(tree, self._rng).calls(target, _CALLS_DRAWN)
        # One machine for all variants: booting takes longer than a run.
        async with lab.bench() as bench:
            recording = await record(bench, module, files, calls, self.name)
            changes = self._changes(files[module.file], target)
            tried = await try_changes(bench, module, files, recording, changes)
        chosen = self._choose(tried)
        if not chosen:
            raise TaskRejectedError(Rejection.NO_BUG_SHOWS, self.name)
        return [
            write_candidate(
                self._source_name,
                module=module,
                target=target,
                files=files,
                recording=recording,
                tried=one,
                rng=self._rng,
            )
            for one in chosen
        ]

    def _changes(self, source: str, target: Target) -> list[tuple[str, str]]:
        bugs = draw_bugs(source, target, self._rng, _BUGS_TRIED)
        changes = [(bug.kind, bug.source) for bug in bugs]
        if self._config.features and target.docstring:
            changes.append((FEATURE, without_body(source, target)))
        return changes

    def _choose(self, tried: Sequence[TriedChange]) -> list[TriedChange]:
        # The last entry per kind wins, which is the one with the fewest failing calls.
        ordered = sorted(tried, key=lambda one: -len(one.failed))
        by_kind = {one.kind: one for one in ordered}
        feature = by_kind.pop(FEATURE, None)
        bugs = sorted(by_kind.values(), key=lambda one: len(one.failed))
        chosen = bugs[: self._config.bugs_per_function]
        return [*chosen, feature] if feature else chosen
