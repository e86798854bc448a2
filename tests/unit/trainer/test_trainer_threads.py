"""Bits depend on torch's thread count: another thread's setting must not reach a pass."""

import threading

import pytest
import torch

from penstock.actors.policy.device import fix_threads
from penstock.actors.trainer.learner import accumulate, run_all


@pytest.fixture(autouse=True)
def others():
    """Let other threads of the process, an engine's say, set another count meanwhile."""
    before = torch.get_num_threads()
    yield lambda: _in_thread(lambda: torch.set_num_threads(3))
    torch.set_num_threads(before)


def _in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def used():
    """Return the thread count that an operation of this thread uses."""
    torch.ones(100_000).sum()
    return torch.get_num_threads()


def test_a_count_that_another_thread_sets_before_the_first_operation_changes_nothing(others):
    found = []

    def work():
        fix_threads(1)
        others()
        found.append(used())

    _in_thread(work)
    assert found == [1]


def test_passes_keep_their_count(others):
    weight = torch.ones(3, requires_grad=True)

    def one():
        others()
        return (weight * weight).sum(), used()

    assert accumulate([weight], [one, one], num_workers=2, num_threads=1) == [1, 1]
    weight.grad = None
    tasks = [lambda: others() or used()] * 2
    assert run_all(tasks, num_workers=2, num_threads=1) == [1, 1]
