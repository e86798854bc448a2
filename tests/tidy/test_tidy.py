"""The repository keeps its own rules."""

import pytest
from tests.tidy.repository import Repository
from tests.tidy.rules import RULES, faults


@pytest.fixture(scope="module")
def repository() -> Repository:
    return Repository()


@pytest.mark.parametrize("name", RULES)
def test_the_repository_is_tidy(name: str, repository: Repository):
    found = faults(name, repository)
    assert not found, "\n".join([RULES[name].__doc__ or name, *found])
