"""Draws trails.

Held out, whatever the seed: a fifth of all pairs of stops that a trail can begin with, chosen by a
hash. No training task and no demonstration begins with one; each task has its own stops, names
and words.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock import HiddenTests, Limits, Split, Task, TaskCandidate, TaskOrigin, TaskRequest

from .config import TrailConfig, TrailTasks

ANSWER_FILE = "answer.txt"
CATEGORY = "trail"
NAMES, NEXT, END = "names", "next", "end"
NUMBERS = (
    *("one", "two", "three", "four", "five", "six"),
    *("seven", "eight", "nine", "ten", "eleven", "twelve"),
)
"""Number the names of a trail, in its order."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_DIGITS = "0123456789"
_WORDS = ("amber", "cedar", "delta", "ember", "field", "grove", "haven", "inlet", "north", "river")
_NAMES = (
    *("adam", "alma", "anna", "boris", "carl", "clara", "dora", "edith", "emil", "erik", "fritz"),
    *("greta", "hugo", "ida", "inge", "ivan", "jana", "karl", "lara", "lena", "leon", "lily"),
    *(
        "marta",
        "max",
        "mila",
        "nils",
        "nora",
        "olga",
        "otto",
        "paul",
        "petra",
        "rosa",
        "tom",
        "vera",
    ),
)
_HIDDEN_FILE = "check.sh"
_HELDOUT_SHARE = 5


@dataclass(frozen=True)
class Trail:
    """A task and what solves it."""

    task: Task
    stops: tuple[str, ...]
    names: tuple[str, ...]
    num_files: int

    @property
    def answer(self) -> str:
        """What the answer's file must say."""
        return numbered_names(dict(zip(NUMBERS, self.names, strict=False)))

    def paths(self, stop: str) -> list[str]:
        """Return the files of a stop."""
        return [f"{stop}/{number}" for number in range(1, self.num_files + 1)]


def numbered_names(names: Mapping[str, str]) -> str:
    """Return names by number as an answer, or a summary, lists them."""
    return " ".join([NAMES, *(f"{number} {name}" for number, name in names.items())])


def trail_tasks(seed: int, request: TaskRequest) -> Iterator[TaskCandidate]:
    """Yield trails of a split; for `[[prepare.sources]]`.

    Raises:
        ConfigError: Wrong settings.

    """
    settings = request.settings(TrailTasks)
    prefix = f"{request.source}-" if settings.prefix is None else settings.prefix
    trails = draw_trails(
        request.split,
        request.num_tasks,
        settings,
        request.limits,
        random.Random(f"{prefix}trails/{request.split}/{seed}"),
        f"{prefix}{request.split}",
    )
    yield from map(to_candidate, trails)


def draw_trails(  # noqa: PLR0913, PLR0917 - all of a set of tasks
    split: Split, num: int, config: TrailConfig, limits: Limits, rng: random.Random, prefix: str
) -> Iterator[Trail]:
    """Yield trails of a split.

    Args:
        split: Training or held out.
        num: How many.
        config: Their size.
        limits: Of each task.
        rng: Decides everything.
        prefix: Of the task ids, e.g. `train`.

    """
    places = [letter + digit for letter in _LETTERS for digit in _DIGITS]
    for index in range(num):
        stops = rng.sample(places, config.num_stops)
        while is_heldout(stops) != (split is Split.HELDOUT):
            stops = rng.sample(places, config.num_stops)
        yield _trail(f"{prefix}-{index:05d}", split, stops, config, limits, rng)


def is_heldout(stops: list[str]) -> bool:
    """Return whether trails that begin so are held out."""
    digest = hashlib.sha256(f"{stops[0]} {stops[1]}".encode()).digest()
    return digest[0] % _HELDOUT_SHARE == 0


def _trail(  # noqa: PLR0913, PLR0917 - all of a task
    task_id: str,
    split: Split,
    stops: list[str],
    config: TrailConfig,
    limits: Limits,
    rng: random.Random,
) -> Trail:
    paths = [f"{stop}/{n}" for stop in stops for n in range(1, config.num_files + 1)]
    marked = sorted(rng.sample(range(len(paths)), config.num_names))
    names = rng.sample(_NAMES, config.num_names)
    numbered = {
        place: [number, name] for place, number, name in zip(marked, NUMBERS, names, strict=False)
    }
    pages: dict[str, str] = {}
    for place, path in enumerate(paths):
        words = _some_words(config.file_bytes, rng)
        words += numbered.get(place, [])
        stop, number = divmod(place, config.num_files)
        if number == config.num_files - 1:
            words += [NEXT, stops[stop + 1]] if stop + 1 < len(stops) else [END]
        pages[path] = " ".join(words) or "empty"
    task = Task(
        task_id=task_id,
        category=CATEGORY,
        split=split,
        instruction=(
            f"Follow the trail from {stops[0]} and write '{NAMES}' and "
            f"its numbered names to {ANSWER_FILE}."
        ),
        files={},
        pages=pages,
        limits=limits,
    )
    return Trail(task, tuple(stops), tuple(names), config.num_files)


def _some_words(num_bytes: int, rng: random.Random) -> list[str]:
    words: list[str] = []
    while sum(len(word) + 1 for word in words) < num_bytes:
        words.append(rng.choice(_WORDS))
    return words


def to_candidate(trail: Trail) -> TaskCandidate:
    """Return a trail with the tests that grade it."""
    hidden = HiddenTests(
        task_id=trail.task.task_id,
        files={_HIDDEN_FILE: f"cat {ANSWER_FILE}\n"},
        argv=["sh", _HIDDEN_FILE],
        expected=[trail.answer],
        gold_files={ANSWER_FILE: trail.answer},
    )
    origin = TaskOrigin(
        source=CATEGORY,
        repository=f"{CATEGORY}/{trail.task.task_id}",
        kind="feature",
        num_files=len(trail.task.pages),
        num_cases=1,
    )
    return TaskCandidate(task=trail.task, hidden=hidden, origin=origin)
