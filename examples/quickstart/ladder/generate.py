"""Draws the ladder's tasks and passes them through the factory's gates.

What is held out, exactly (nothing of it occurs in training tasks or in demonstrations):

- by name: the (verb, noun) pairs that make a held-out task's function name, a fifth of all pairs,
  chosen by a hash, whatever the run's seed;
- by bug: a fifth of all (function, variant, bug) triples, again by a hash. No training task has
  one; the held-out category `unseen` has no others;
- by family: every function of the families in `NOVEL_FAMILIES`, the held-out category `novel`.

Each further one is harder: a new repository with a known kind of bug, a known function with a bug
never met, a function never met.
"""

import random
from collections.abc import Collection, Iterable, Iterator
from functools import cache

import msgspec
from msgspec.structs import replace

from penstock import (
    ConfigError,
    HiddenTests,
    PenstockError,
    Split,
    TaskCandidate,
    TaskOrigin,
    TaskRequest,
)
from penstock.envs.tasks.gates import REPEATS, SuiteReport, check_reports, read_report
from penstock.messages.sandbox import ExecResult

from .dry_run import run_program
from .function import BODY, BUG_CATEGORIES, Function
from .names import is_kept_out
from .numbers import NUMBERS
from .repository import (
    HIDDEN_FILE,
    PAIR,
    SEARCH,
    BugPlace,
    Repository,
    RepositorySpec,
    build_repository,
)
from .sequences import SEQUENCES
from .text import TEXT

NOVEL = "novel"
UNSEEN = "unseen"
HELDOUT_CATEGORIES = (UNSEEN, NOVEL)
"""Never trained on: for measuring only."""
NOVEL_FAMILIES = frozenset({"area", "dot", "quote", "spread", "without"})
LADDER = (*BUG_CATEGORIES, SEARCH)
"""Categories by default; `PAIR` is drawn where it is named."""
_ATTEMPTS_MAX = 200


class BrokenTaskError(PenstockError, ValueError):
    """The ladder has no task of the requested kind; the text names it."""


class Selection(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which part of the ladder."""

    categories: tuple[str, ...] = LADDER
    """Categories in equal shares; in the held-out split also those of `HELDOUT_CATEGORIES`."""
    families: tuple[str, ...] = ()
    """Families of function templates; empty: all but the novel ones."""

    def __post_init__(self) -> None:
        """Refuse unknown names."""
        _check_known("categories", self.categories, (*LADDER, PAIR, *HELDOUT_CATEGORIES))
        _check_known("families", self.families, [f.template.family for f in functions()])


class LadderTasks(Selection, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of a source of the ladder's tasks."""

    prefix: str | None = None
    """Begins the tasks' ids and their seed; by default the source's name with a hyphen."""


def ladder_tasks(seed: int, request: TaskRequest) -> Iterator[TaskCandidate]:
    """Yield the ladder's tasks of a split; for `[[prepare.sources]]`.

    Raises:
        ConfigError: Wrong settings.
        BrokenTaskError: The ladder has too few such tasks.

    """
    settings = request.settings(LadderTasks)
    prefix = f"{request.source}-" if settings.prefix is None else settings.prefix
    name = f"{prefix}{request.split}"
    source = LadderSource(
        request.split, request.num_tasks, settings, random.Random(f"{name}/{seed}"), name
    )
    for one in source.candidates():
        yield replace(one, task=replace(one.task, limits=request.limits))


def draw_repositories(
    split: Split, num: int, selection: Selection, rng: random.Random, prefix: str
) -> Iterator[Repository]:
    """Yield distinct tasks of a split, the categories taking turns.

    Args:
        split: training or held out.
        num: how many.
        selection: from which categories and families.
        rng: decides everything.
        prefix: of the task ids, e.g. `train`.

    Raises:
        BrokenTaskError: no fitting task was found in many attempts.

    """
    categories = selection.categories
    pools = {category: _sites(split, category, selection.families) for category in categories}
    others = functions(selection.families)
    seen: set[str] = set()
    for index in range(num):
        category = categories[index % len(categories)]
        for _ in range(_ATTEMPTS_MAX):
            num_bugs = 2 if category == PAIR else 1
            places = tuple(BugPlace(*rng.choice(pools[category])) for _ in range(num_bugs))
            around = rng.sample(others, rng.randint(1, 3))
            draft = RepositorySpec(places, split, category)
            found = build_repository(draft, around, f"{prefix}-{index:05d}", rng)
            if found and (texts := "\n".join(one.text for one in found.faults)) not in seen:
                break
        else:
            raise BrokenTaskError(f"no new {category} task of {split} in {_ATTEMPTS_MAX} attempts")
        seen.add(texts)
        yield found


@cache
def functions(families: tuple[str, ...] = ()) -> list[Function]:
    """Return every variant of some families; of all but the novel ones where none are named."""
    return [
        function
        for function in _FUNCTIONS
        if function.template.family in families
        or (not families and function.template.family not in NOVEL_FAMILIES)
    ]


def _sites(split: Split, category: str, families: tuple[str, ...]) -> list[tuple[Function, str]]:
    """Return the (function, bug) pairs of a split and category."""
    if split is not Split.HELDOUT and (
        category in HELDOUT_CATEGORIES or NOVEL_FAMILIES & set(families)
    ):
        raise BrokenTaskError(f"category {category} or its families are never trained on")
    found = []
    for function in functions(tuple(NOVEL_FAMILIES) if category == NOVEL else families):
        for site in function.killers:
            fits = is_kept_out(function.name, site) == (category == UNSEEN)
            if (site == BODY or category == NOVEL or fits) and _is_of_category(site, category):
                found.append((function, site))
    if not found:
        raise BrokenTaskError(f"no function of the {split} split has a bug of category {category}")
    return found


def _is_of_category(site: str, category: str) -> bool:
    if category in {SEARCH, PAIR, *HELDOUT_CATEGORIES}:
        return site != BODY
    return site.rstrip("0123456789") == category


def _check_known(field: str, given: Iterable[str], known: Collection[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        choices = ", ".join(dict.fromkeys(known))
        raise ConfigError(f"{field}: expected some of {choices}, got {unknown}")


_FUNCTIONS = tuple(
    Function(template, variant)
    for template in (*NUMBERS, *SEQUENCES, *TEXT)
    for variant in range(len(template.variants))
)


class LadderSource:
    """Tasks of the ladder, the same for the same arguments, forever.

    Args:
        split: training or held out.
        num: how many.
        selection: categories and families.
        rng: decides everything.
        prefix: of the task ids.

    """

    name = "ladder"

    def __init__(
        self, split: Split, num: int, selection: Selection, rng: random.Random, prefix: str
    ) -> None:
        self._repositories = draw_repositories(split, num, selection, rng, prefix)

    def candidates(self) -> Iterator[TaskCandidate]:
        """Yield the tasks that a run starts from, each through the factory's gates.

        They are run in this process: only this project wrote their files.

        Raises:
            TaskRejectedError: A task fails its gates: a fault of the ladder.

        """
        for repository in self._repositories:
            candidate = to_candidate(repository)
            task, hidden = candidate.task, candidate.hidden
            null = [grade_here(task.files, hidden) for _ in range(REPEATS)]
            gold = [grade_here(task.files | hidden.gold_files, hidden) for _ in range(REPEATS)]
            check_reports(task.task_id, null, gold)
            yield candidate


def grade_here(files: dict[str, str], hidden: HiddenTests) -> SuiteReport:
    """Run hidden tests in this process: for files that this project wrote, never a policy's."""
    exit_code, output = run_program(files | hidden.files, HIDDEN_FILE)
    return read_report(ExecResult(exit_code=exit_code, stdout=output.encode()), hidden.expected)


def to_candidate(repository: Repository) -> TaskCandidate:
    """Say of a ladder task where it comes from."""
    task, faults = repository.task, repository.faults
    names = "+".join(one.function_name for one in faults)
    origin = TaskOrigin(
        source=LadderSource.name,
        repository=f"ladder/{task.task_id}",
        kind="feature" if task.category == "body" else "bug",
        function=names,
        path=faults[0].path,
        digest=names,
        change=task.category,
        num_lines=sum(len(one.gold.splitlines()) for one in faults),
        num_files=len(task.files),
        num_cases=len(repository.hidden.expected),
        hint="symptom" if task.category == "search" else "function",
    )
    return TaskCandidate(task=task, hidden=repository.hidden, origin=origin)
