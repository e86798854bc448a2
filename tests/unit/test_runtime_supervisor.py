"""Restart intensity and strategies, as in OTP."""

import asyncio

import pytest

from penstock.actors.runtime.clock import run_virtual
from penstock.actors.runtime.supervisor import Decision, RestartPolicy, Strategy, Supervisor


def test_more_failures_than_the_intensity_within_the_period_escalate():
    policy = RestartPolicy(intensity=2, period_s=10.0)
    decisions = [policy.on_failure("a", now) for now in (0.0, 4.0, 9.9)]
    assert decisions == [Decision.RESTART, Decision.RESTART, Decision.ESCALATE]


def test_failures_older_than_the_period_are_forgotten():
    policy = RestartPolicy(intensity=2, period_s=10.0)
    decisions = {policy.on_failure("a", now) for now in range(0, 100, 6)}
    assert decisions == {Decision.RESTART}
    assert policy.recent() == ["a", "a"]


def test_an_intensity_of_zero_allows_no_failure():
    assert RestartPolicy(intensity=0, period_s=1.0).on_failure("a", 0.0) is Decision.ESCALATE


def supervise(strategy: Strategy, failing: dict[str, int], intensity: int = 10):
    """Run children a, b, c: each fails so often, then lives ten seconds; return what happened."""
    happened: list[str] = []

    def child(name: str):
        async def live() -> None:
            happened.append(f"+{name}")
            try:
                await asyncio.sleep(1.0)
                if failing.get(name, 0) > 0:
                    failing[name] -= 1
                    raise RuntimeError(name)
                await asyncio.sleep(9.0)
            except asyncio.CancelledError:
                happened.append(f"-{name}")
                raise

        return live

    supervisor = Supervisor(
        {name: child(name) for name in "abc"},
        RestartPolicy(intensity=intensity, period_s=60.0, strategy=strategy),
    )
    try:
        run_virtual(supervisor.run())
    except RuntimeError as error:
        happened.append(f"!{error}")
    return happened, supervisor.num_restarts


def test_one_for_one_restarts_the_one_that_failed():
    happened, num_restarts = supervise(Strategy.ONE_FOR_ONE, {"b": 2})
    assert happened == ["+a", "+b", "+c", "+b", "+b"]
    assert num_restarts == 2


def test_rest_for_one_restarts_what_was_started_later_too():
    happened, _ = supervise(Strategy.REST_FOR_ONE, {"b": 1})
    assert happened == ["+a", "+b", "+c", "-c", "+b", "+c"]


def test_escalation_ends_all_the_last_first_and_raises_the_failure():
    happened, num_restarts = supervise(Strategy.ONE_FOR_ONE, {"b": 5}, intensity=1)
    assert happened == ["+a", "+b", "+c", "+b", "-c", "-a", "!b"]
    assert num_restarts == 1


def test_a_cancelled_supervisor_cancels_its_children():
    ended = []

    async def child() -> None:
        try:
            await asyncio.sleep(100)
        finally:
            ended.append(1)

    async def main() -> None:
        supervisor = Supervisor({"a": child}, RestartPolicy(intensity=1, period_s=1.0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(supervisor.run(), 5)

    run_virtual(main())
    assert ended == [1]
