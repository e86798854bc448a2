"""Draws the task sets of a run and passes every task through its gates.

What is held out, exactly (nothing of it occurs in training tasks or in demonstrations):

- by place: about a fifth of all (function, variant, bug) triples, chosen by a hash, whatever the
  run's seed; a held-out task is made of these only, but for the `body` rung, where the whole body
  is missing and the triple is the function itself;
- by name: the (verb, noun) pairs that make a held-out task's function name, again by a hash;
- by family: every function of the families in `NOVEL_FAMILIES`, the rung `novel`.
"""

import random
from collections.abc import Iterator

from penstock.envs.ladder.execute import run_program
from penstock.envs.ladder.function import Function
from penstock.envs.ladder.mutate import BODY, RUNGS
from penstock.envs.ladder.names import is_kept_out
from penstock.envs.ladder.numbers import NUMBERS
from penstock.envs.ladder.repository import (
    HIDDEN_FILE,
    SEARCH,
    Draft,
    Repository,
    build_repository,
)
from penstock.envs.ladder.sequences import SEQUENCES
from penstock.envs.ladder.text import TEXT
from penstock.messages.errors import PenstockError
from penstock.messages.task import HiddenTests, Split, Task, TaskSet

NOVEL = "novel"
NOVEL_FAMILIES = frozenset({"area", "dot", "quote", "spread", "without"})
LADDER = (*RUNGS, SEARCH)
_ATTEMPTS_MAX = 200


class BrokenTaskError(PenstockError, ValueError):
    """A task fails its own gates: the text names the task and the gate."""


def draw_repositories(
    split: Split, num: int, rungs: tuple[str, ...], rng: random.Random, prefix: str
) -> Iterator[Repository]:
    """Yield distinct tasks of a split, the rungs taking turns.

    Args:
        rungs: of `LADDER`; in the held-out split also `novel`.
        prefix: of the task ids, e.g. `train`.

    Raises:
        BrokenTaskError: no fitting task was found in many attempts.

    """
    pools = {rung: _sites(split, rung) for rung in rungs}
    seen: set[str] = set()
    for index in range(num):
        rung = rungs[index % len(rungs)]
        for _ in range(_ATTEMPTS_MAX):
            found = _draw(split, rung, pools[rung], f"{prefix}-{index:05d}", rng)
            if found and found.task.files[found.path] not in seen:
                break
        else:
            raise BrokenTaskError(f"no new {rung} task of {split} in {_ATTEMPTS_MAX} attempts")
        seen.add(found.task.files[found.path])
        check_gates(found.task, found.hidden)
        yield found


def check_gates(task: Task, hidden: HiddenTests) -> None:
    """Demand that the task as given fails its hidden tests and the known solution passes.

    Raises:
        BrokenTaskError: it is not so.

    """
    if is_solved(task.files, hidden):
        raise BrokenTaskError(f"task {task.task_id}: passes its hidden tests without any edit")
    if not is_solved(task.files | hidden.gold_files, hidden):
        raise BrokenTaskError(f"task {task.task_id}: its known solution fails its hidden tests")


def is_solved(files: dict[str, str], hidden: HiddenTests) -> bool:
    """Run hidden tests in this process: for files that this project wrote, never a policy's."""
    exit_code, _ = run_program(files | hidden.files, HIDDEN_FILE)
    return exit_code == 0


def to_task_set(repositories: list[Repository]) -> TaskSet:
    """Return tasks and hidden tests without what only demonstrations know."""
    return TaskSet(
        tasks=[repository.task for repository in repositories],
        hidden=[repository.hidden for repository in repositories],
    )


def functions(*, novel: bool) -> list[Function]:
    """Return every template with every variant, of the novel families or of the others."""
    return [
        Function(template, variant)
        for template in (*NUMBERS, *SEQUENCES, *TEXT)
        for variant in range(len(template.variants))
        if (template.family in NOVEL_FAMILIES) == novel
    ]


def _sites(split: Split, rung: str) -> list[tuple[Function, str]]:
    """Return the (function, bug) pairs of a split and rung."""
    if rung == NOVEL and split is not Split.HELDOUT:
        raise BrokenTaskError("novel families are never trained on")
    found = []
    for function in functions(novel=rung == NOVEL):
        for site in function.killers:
            is_body = site == BODY
            kept_out = is_kept_out(function.name, site) == (split is Split.HELDOUT)
            right_split = is_body or rung == NOVEL or kept_out
            if right_split and _is_on_rung(site, rung):
                found.append((function, site))
    return found


def _is_on_rung(site: str, rung: str) -> bool:
    if rung in {SEARCH, NOVEL}:
        return site != BODY
    return site.rstrip("0123456789") == rung


def _draw(
    split: Split, rung: str, pool: list[tuple[Function, str]], task_id: str, rng: random.Random
) -> Repository | None:
    function, site = rng.choice(pool)
    others = rng.sample(_ORDINARY, rng.randint(1, 3))
    draft = Draft(function, site, split, rung)
    return build_repository(draft, others, task_id, rng)


_ORDINARY = functions(novel=False)
