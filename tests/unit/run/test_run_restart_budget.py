"""Restart intensity and period, as in OTP."""

from penstock.infra.run.charges import RestartBudget


def test_more_failures_than_the_intensity_within_the_period_are_not_restarted():
    budget = RestartBudget(intensity=2, period_s=10.0)
    decisions = [budget.allows_restart(now) for now in (0.0, 4.0, 9.9)]
    assert decisions == [True, True, False]


def test_failures_older_than_the_period_are_forgotten():
    budget = RestartBudget(intensity=2, period_s=10.0)
    decisions = {budget.allows_restart(now) for now in range(0, 100, 6)}
    assert decisions == {True}


def test_an_intensity_of_zero_allows_no_failure():
    assert not RestartBudget(intensity=0, period_s=1.0).allows_restart(0.0)
