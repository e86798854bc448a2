"""`with_retries`: what it retries, how long it pauses, when it gives up."""

import asyncio

import pytest
from tests.support.virtual_clock import run_virtual

from penstock.messages.retries import RetryPolicy, with_retries


class Failing:
    """Fails so many times with the given errors, then returns their number."""

    def __init__(self, *errors: Exception, takes_s: float = 0.0) -> None:
        self.errors = list(errors)
        self.takes_s = takes_s
        self.started_at: list[float] = []

    async def __call__(self) -> int:
        self.started_at.append(asyncio.get_running_loop().time())
        await asyncio.sleep(self.takes_s)
        if len(self.started_at) <= len(self.errors):
            raise self.errors[len(self.started_at) - 1]
        return len(self.started_at)


def run(operation: Failing, policy: RetryPolicy, **options) -> int:
    return run_virtual(with_retries(operation, policy, retry_on=(OSError,), **options))


def test_it_returns_the_first_success():
    operation = Failing(OSError("a"), ConnectionError("b"))
    assert run(operation, RetryPolicy(pause_s=1.0)) == 3
    assert operation.started_at == [0.0, 1.0, 2.0]


def test_pauses_double_up_to_their_bound():
    operation = Failing(*[OSError()] * 5)
    run(operation, RetryPolicy(pause_s=1.0, pause_s_max=3.0))
    assert operation.started_at == [0.0, 1.0, 3.0, 6.0, 9.0, 12.0]


def test_other_errors_pass_at_once():
    operation = Failing(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        run(operation, RetryPolicy(pause_s=1.0))
    assert operation.started_at == [0.0]


def test_a_final_error_is_not_retried():
    operation = Failing(OSError("busy"), OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        run(operation, RetryPolicy(pause_s=1.0), is_final=lambda error: "gone" in str(error))
    assert operation.started_at == [0.0, 1.0]


def test_the_last_error_is_raised_after_the_last_attempt():
    operation = Failing(OSError("1"), OSError("2"), OSError("3"), OSError("4"))
    with pytest.raises(OSError, match="3"):
        run(operation, RetryPolicy(pause_s=1.0, num_attempts_max=3))
    assert len(operation.started_at) == 3


def test_no_attempt_starts_after_the_deadline():
    operation = Failing(*[OSError()] * 9, takes_s=2.0)
    with pytest.raises(OSError):
        run(operation, RetryPolicy(pause_s=1.0, deadline_s=7.0))
    assert operation.started_at == [0.0, 3.0, 6.0]


def test_cancellation_ends_it_in_the_pause_and_in_the_attempt():
    async def cancelled_after(seconds: float) -> int:
        operation = Failing(*[OSError()] * 9, takes_s=1.0)
        policy = RetryPolicy(pause_s=10.0)
        task = asyncio.create_task(with_retries(operation, policy, retry_on=(OSError,)))
        await asyncio.sleep(seconds)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return len(operation.started_at)

    assert run_virtual(cancelled_after(0.5)) == 1
    assert run_virtual(cancelled_after(5.0)) == 1


def test_an_outer_timeout_bounds_it():
    async def bounded() -> None:
        async with asyncio.timeout(4.5):
            await with_retries(
                Failing(*[OSError()] * 99), RetryPolicy(pause_s=1.0), retry_on=(OSError,)
            )

    with pytest.raises(TimeoutError):
        run_virtual(bounded())
