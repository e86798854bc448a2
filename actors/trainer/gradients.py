"""Gradients of several passes at once, with the same bits as one after the other.

Every pass runs on its own thread with a fixed number of torch threads, and the gradients are added
in the order of the passes. So the number of workers changes the time and not one bit: a run that
shares its cores with generators and a replay that has them all give the same weights.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from penstock.actors.policy.device import fix_threads

Result = TypeVar("Result")
PassFigures = TypeVar("PassFigures")
Pass = Callable[[], tuple[torch.Tensor, PassFigures]]
"""Computes a 0-dim loss, and whatever the caller wants to know of the pass."""


def accumulate(
    parameters: Sequence[torch.Tensor],
    passes: Sequence[Pass[PassFigures]],
    *,
    num_workers: int,
    num_threads: int,
) -> list[PassFigures]:
    """Set the parameters' gradients to the sum over all passes; parameters not used keep none.

    Args:
        parameters: what to differentiate by; not to be changed meanwhile.
        passes: at most `num_workers` of them hold their activations at once.
        num_workers: threads that run passes.
        num_threads: of torch, inside one pass.

    Returns:
        The figures of each pass, in order.

    """

    def run(one: Pass[PassFigures]) -> tuple[tuple[torch.Tensor | None, ...], PassFigures]:
        fix_threads(num_threads)
        loss, figures = one()
        return torch.autograd.grad(loss, parameters, allow_unused=True), figures

    found = []
    with ThreadPoolExecutor(num_workers, thread_name_prefix="gradients") as pool:
        for gradients, figures in pool.map(run, passes):
            _add(parameters, gradients)
            found.append(figures)
    return found


def run_all(
    tasks: Sequence[Callable[[], Result]], *, num_workers: int, num_threads: int
) -> list[Result]:
    """Return what tasks give, in order, computed at once and without gradients.

    Args:
        tasks: forward passes.
        num_workers: threads that run them.
        num_threads: of torch, inside one.

    """

    def run(task: Callable[[], Result]) -> Result:
        fix_threads(num_threads)
        with torch.no_grad():
            return task()

    with ThreadPoolExecutor(num_workers, thread_name_prefix="forward") as pool:
        return list(pool.map(run, tasks))


def _add(parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        if gradient is None:
            continue
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
