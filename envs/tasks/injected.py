"""Bug injection and feature deletion: tasks made of the functions of a module.

For each function: draw calls, record what the original gives (twice, under different hash seeds),
draw bugs, see in the same machine which calls each bug changes, and keep the bug that shows in the
fewest calls: the subtle one. A function with a docstring gives a second task without its body.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from penstock.envs.tasks.differential import (
    ARGV,
    FAILED_IMPORT,
    PROGRAM_FILE,
    RECORD_ARGV,
    is_weak,
    program,
    tells,
)
from penstock.envs.tasks.inputs import CallWriter, familiarity
from penstock.envs.tasks.modules import Module, needed_files
from penstock.envs.tasks.mutations import draw_bugs, without_body
from penstock.envs.tasks.source import (
    Bench,
    Candidate,
    Lab,
    Origin,
    Plan,
    Rejection,
    TaskRejectedError,
)
from penstock.envs.tasks.targets import find_targets, promise
from penstock.envs.tasks.wording import HINTS, bug_instruction, feature_instruction
from penstock.messages.task import HiddenTests, Limits, Split, Task

LIMITS = Limits(num_turns_max=24, num_tokens_max=32_768, turn_tokens_max=2_048, wall_s_max=600.0,
                tool_s_max=30.0, output_bytes_max=16_384)  # fmt: skip
_CALLS_DRAWN = 48
_CALLS_MIN = 6
_HIDDEN_MAX = 16
_SHOWN = 2
_WEAK_SHARE_MAX = 0.34
_RESULTS_MIN = 2
_POINTS_MIN = 3
_HANDFUL = 12
"""Modules read at once."""
_BUGS_TRIED = 5


class InjectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is made of each function."""

    seed: int = 0
    bugs_per_function: int = 3
    """Of different kinds."""
    features: bool = True
    functions_per_module: int = 8


@dataclass(frozen=True)
class _Tried:
    """A change of the module and the indexes of the calls whose results it changes."""

    kind: str
    source: str
    failed: tuple[int, ...]


class InjectedSource:
    """Tasks from a list of modules."""

    def __init__(self, name: str, modules: Sequence[Module], config: InjectConfig) -> None:
        """Take the modules in an order that the seed decides."""
        self.name = name
        self._modules, self._config = list(modules), config
        random.Random(f"{name}/{config.seed}").shuffle(self._modules)

    def plans(self) -> Iterator[Plan]:
        """Yield one plan a function, the promising ones of each handful of modules first."""
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
        if promise(target) and (points := promise(target) + familiarity(target)) >= _POINTS_MIN
    ]
    rng.shuffle(plans)
    return sorted(plans, key=lambda plan: -plan.promise)[: config.functions_per_module]


@lru_cache(maxsize=_HANDFUL)
def parsed(module: Module) -> ast.Module:
    """Parse a module.

    Raises:
        TaskRejectedError: It does not parse, or is too large.

    """
    try:
        return ast.parse(module.read())
    except (SyntaxError, ValueError, RecursionError) as error:
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
        """Draw nothing yet."""
        self.name = f"{module.name}:{qualname}"
        self.promise = points
        self._source_name, self._module, self._config = source_name, module, config
        self._qualname = qualname
        self._rng = random.Random(f"{config.seed}/{self.name}")

    async def draft(self, lab: Lab) -> list[Candidate]:
        """Record, try bugs, and make a task of each that shows."""
        files = needed_files(self._module)
        self._tree = parsed(self._module)
        self._target = next(t for t in find_targets(self._tree) if t.qualname == self._qualname)
        source = files[self._module.file]
        changes = [
            (bug.kind, bug.source)
            for bug in draw_bugs(source, self._target, self._rng, _BUGS_TRIED)
        ]
        if self._config.features and self._target.docstring:
            changes.append(("feature", without_body(source, self._target)))
        async with lab.bench() as bench:
            calls, lines = await self._record(bench, files)
            tried = await self._try(bench, files, calls, lines, changes)
        bugs = sorted(
            (one for one in tried if one.kind != "feature"), key=lambda one: len(one.failed)
        )
        by_kind = {one.kind: one for one in reversed(bugs)}
        chosen = sorted(by_kind.values(), key=lambda one: len(one.failed))
        chosen = chosen[: self._config.bugs_per_function]
        chosen += [one for one in tried if one.kind == "feature"]
        if not chosen:
            raise TaskRejectedError(Rejection.NO_BUG_SHOWS, self.name)
        return [self._candidate(files, one, calls, lines) for one in chosen]

    async def _record(self, bench: Bench, files: dict[str, str]) -> tuple[list[str], list[str]]:
        """Return the calls that tell something and what the original gives for each."""
        drawn = CallWriter(self._tree, self._rng).calls(self._target, _CALLS_DRAWN)
        text = program(self._module.name, drawn)
        runs = await bench.run(files | {PROGRAM_FILE: text}, RECORD_ARGV, [{}, {}])
        first, second = runs
        if first is None or second is None or len(first) != len(drawn):
            raise TaskRejectedError(Rejection.DOES_NOT_RUN, f"{self.name}: no results")
        if first[0] == FAILED_IMPORT:
            raise TaskRejectedError(Rejection.DOES_NOT_RUN, f"{self.name}: cannot be imported")
        stable = [
            (call, line)
            for call, line, again in zip(drawn, first, second, strict=True)
            if line == again and tells(line)
        ]
        values = [pair for pair in stable if not is_weak(pair[1])]
        weak = [pair for pair in stable if is_weak(pair[1])][: int(len(values) * _WEAK_SHARE_MAX)]
        kept = values + weak
        if len(values) < _CALLS_MIN or len({line for _, line in kept}) < _RESULTS_MIN:
            detail = f"{self.name}: {len(values)} of {len(drawn)} calls give a value"
            raise TaskRejectedError(Rejection.TOO_FEW_CALLS, detail)
        return [call for call, _ in kept], [line for _, line in kept]

    async def _try(
        self,
        bench: Bench,
        files: dict[str, str],
        calls: list[str],
        lines: list[str],
        changes: list[tuple[str, str]],
    ) -> list[_Tried]:
        """Return the changes that show, with the calls that they show in."""
        text = program(self._module.name, calls)
        variants = [{self._module.file: source} for _, source in changes]
        runs = await bench.run(files | {PROGRAM_FILE: text}, RECORD_ARGV, variants)
        found = []
        for (kind, source), run in zip(changes, runs, strict=True):
            if run is not None and len(run) == len(lines) and run[0] != FAILED_IMPORT:
                pairs = enumerate(zip(run, lines, strict=True))
                failed = tuple(index for index, (got, want) in pairs if got != want)
                if failed:
                    found.append(_Tried(kind, source, failed))
        return found

    def _candidate(
        self, files: dict[str, str], tried: _Tried, calls: list[str], lines: list[str]
    ) -> Candidate:
        shown, hidden = self._divide(tried, len(calls))
        kind = "feature" if tried.kind == "feature" else "bug"
        path, target = self._module.file, self._target
        hint = self._rng.choice(HINTS) if kind == "bug" else "function"
        examples = [(calls[index], lines[index]) for index in shown]
        write = feature_instruction if kind == "feature" else bug_instruction
        task_id = f"{self.name.replace(':', '.')}.{tried.kind}"
        task = Task(
            task_id=task_id,
            rung=kind,
            split=Split.TRAIN,
            instruction=write(target, path, hint, examples),
            files=files | {path: tried.source},
            limits=LIMITS,
        )
        tests = HiddenTests(
            task_id=task_id,
            files={PROGRAM_FILE: program(self._module.name, [calls[index] for index in hidden])},
            argv=ARGV,
            expected=[lines[index] for index in hidden],
            gold_files={path: files[path]},
            timeout_s=20.0,
            sealed_modules=self._sealed(),
        )
        origin = Origin(
            source=self._source_name,
            repository=self._module.repository,
            kind=kind,
            function=target.qualname,
            path=path,
            digest=target.digest,
            change=tried.kind,
            num_lines=target.num_lines,
            num_files=len(files),
            num_cases_failed=len(set(tried.failed) & set(hidden)),
            num_cases=len(hidden),
            hint=hint,
        )
        return Candidate(task=task, hidden=tests, origin=origin)

    def _sealed(self) -> list[str]:
        """Return the modules that the machine has a right copy of."""
        name = self._module.name
        return [name.removeprefix(f"{self._module.prefix}.")] if self._module.prefix else []

    def _divide(self, tried: _Tried, num: int) -> tuple[list[int], list[int]]:
        """Return the calls to show and the hidden ones; a bug shows in one of the first at most."""
        failed = list(tried.failed)
        self._rng.shuffle(failed)
        right = [index for index in range(num) if index not in tried.failed]
        self._rng.shuffle(right)
        num_failing_shown = 1 if len(failed) > 1 else 0
        shown = failed[:num_failing_shown] + right[: _SHOWN - num_failing_shown]
        if not right and len(failed) > _SHOWN:
            shown = failed[:_SHOWN]
        rest_failed = [index for index in failed if index not in shown]
        rest_right = [index for index in right if index not in shown]
        kept = rest_failed[: _HIDDEN_MAX - 4] + rest_right
        return sorted(shown), sorted(kept[:_HIDDEN_MAX])
