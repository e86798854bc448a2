"""Work on several threads, its results in order, few of them at a time."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def ordered_map(
    work: Callable[[Item], Result], items: Iterable[Item], num_threads: int
) -> Iterator[Result]:
    """Yield `work(item)` in the order of the items; at most `num_threads + 1` are in memory."""
    pending: deque[Future[Result]] = deque()
    pool = ThreadPoolExecutor(num_threads)
    try:
        for item in items:
            pending.append(pool.submit(work, item))
            if len(pending) > num_threads:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
