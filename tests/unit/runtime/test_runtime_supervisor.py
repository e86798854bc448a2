"""Restart intensity and period, as in OTP."""

from penstock.actors.runtime.supervisor import Decision, RestartPolicy


def test_more_failures_than_the_intensity_within_the_period_escalate():
    policy = RestartPolicy(intensity=2, period_s=10.0)
    decisions = [policy.on_failure(now) for now in (0.0, 4.0, 9.9)]
    assert decisions == [Decision.RESTART, Decision.RESTART, Decision.ESCALATE]


def test_failures_older_than_the_period_are_forgotten():
    policy = RestartPolicy(intensity=2, period_s=10.0)
    decisions = {policy.on_failure(now) for now in range(0, 100, 6)}
    assert decisions == {Decision.RESTART}


def test_an_intensity_of_zero_allows_no_failure():
    assert RestartPolicy(intensity=0, period_s=1.0).on_failure(0.0) is Decision.ESCALATE
