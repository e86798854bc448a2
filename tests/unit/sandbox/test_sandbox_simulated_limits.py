"""What cannot be simulated is refused by the flag's name."""

import pytest
from tests.lab.simulate.sandboxes.settings import BurstScenario

from penstock.messages.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"num_machines": 10, "num_hosts": 2, "num_failures": 0}, "--machines"),
        ({"num_machines": 17}, "--machines"),
        ({"num_machines": 0}, "--machines"),
        ({"num_machines": 1600, "num_hosts": 2, "num_failures": 0}, "--machines"),
        ({"num_failures": -1}, "--failures"),
        ({"num_machines": 16, "num_hosts": 2, "num_failures": 2}, "--failures"),
        ({"num_hosts": 0}, "--hosts"),
    ],
)
def test_a_burst_that_cannot_be_is_refused(changes: dict[str, int], flag: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: expected .*, got "):
        BurstScenario(**changes)
