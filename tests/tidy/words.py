"""Rules on words that a program can decide: reasons in concurrent code, fields, names of types."""

import ast
import re
from collections.abc import Collection, Iterator

from tests.tidy import pending
from tests.tidy.repository import PRODUCT, Repository

# What orders, bounds or shares work: each is a place where a reader asks why.
CONCURRENT = re.compile(
    r"\b(?:asyncio|anyio|threading|multiprocessing)\.(?:create_task|gather|wait|wait_for|timeout|shield"
    r"|to_thread|TaskGroup|Lock|Event|Condition|Semaphore|BoundedSemaphore|Queue|Thread|RLock|Future)\b"
    r"|\b(?:ThreadPoolExecutor|run_in_executor|call_soon_threadsafe|flock)\b"
)
CONCURRENT_MIN = 4
"""Constructs from which on a file counts as concurrent code."""
LINES_PER_REASON_MAX = 60

DIRECTIVE = re.compile(r"#\s*(?:noqa|type:|pyright:|fmt:|pragma|ruff:|!)")
VAGUE = re.compile(r"(?:Of|Whose|Those)\b")

# Past participles and verbs that say what happened and not what the object is.
NOUNLESS = re.compile(
    r"_?(?:[A-Z][a-z]+ed|Said|Told|Held|Sent|Read|Kept|Made|Left|Lost|Drawn|Given|Seen|Shown|Known"
    r"|Taken|Written|Gone|Done|Found|Met|Paid|Put|Run[n]ing|Understood|Forwarded)\Z"
)
NOUNS = {"Feed", "Seed", "Speed"}


def _beyond_pending(faults: Iterator[str], pending: Collection[str]) -> Iterator[str]:
    """Yield the faults of files that are not listed as pending, and listed files without a fault.

    So a list can only shrink: a new file never gets onto it unseen, and a mended one has to go.
    """
    seen: set[str] = set()
    for fault in faults:
        path = fault.split(":")[0]
        seen.add(path)
        if path not in pending:
            yield fault
    for path in sorted({*pending} - seen):
        yield f"{path}: no fault any more; remove it from tests/tidy/pending.py"


def reasons(repository: Repository, path: str) -> list[int]:
    """Return the lines of a file's comments; instructions to tools are none."""
    return [line for line, text in repository.comments(path) if not DIRECTIVE.match(text)]


def unexplained(repository: Repository) -> Iterator[str]:
    """Yield concurrent files with too few comments, whether pending or not."""
    for path in repository.python():
        text = repository.text(path)
        num_constructs = len(CONCURRENT.findall(text))
        if num_constructs < CONCURRENT_MIN:
            continue
        lines, found = text.count("\n"), len(reasons(repository, path))
        if found * LINES_PER_REASON_MAX < lines:
            yield f"{path}: {num_constructs} concurrent constructs, {found} comments, {lines} lines"


def vague(repository: Repository) -> Iterator[str]:
    """Yield field docstrings that lean on the class, whether pending or not."""
    for path in repository.python():
        for node in repository.nodes(path):
            if not isinstance(node, ast.ClassDef):
                continue
            for statement in node.body[1:]:
                if (
                    isinstance(statement, ast.Expr)
                    and isinstance(statement.value, ast.Constant)
                    and isinstance(statement.value.value, str)
                    and VAGUE.match(statement.value.value)
                ):
                    yield f"{path}:{statement.lineno}: {statement.value.value.splitlines()[0]!r}"


def nounless(repository: Repository) -> Iterator[str]:
    """Yield class names without a noun, whether pending or not."""
    for path in repository.python(*PRODUCT):
        for node in repository.nodes(path):
            if not isinstance(node, ast.ClassDef) or node.name.lstrip("_") in NOUNS:
                continue
            if NOUNLESS.match(node.name):
                yield f"{path}:{node.lineno}: {node.name}"


def unexplained_concurrency(repository: Repository) -> Iterator[str]:
    """Concurrent code says why: the race, the order, the bound (a comment per 60 lines)."""
    return _beyond_pending(unexplained(repository), pending.UNEXPLAINED)


def vague_field_docstrings(repository: Repository) -> Iterator[str]:
    """A field's docstring is a phrase that stands alone, and does not lean on the class."""
    return _beyond_pending(vague(repository), pending.VAGUE)


def types_without_a_noun(repository: Repository) -> Iterator[str]:
    """A class is named after what it is, not after what happened to it."""
    return _beyond_pending(nounless(repository), pending.NOUNLESS)
