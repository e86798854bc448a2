"""Every judge can be chosen by its name."""

import pytest

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.registry import JUDGES, make_judge
from penstock.messages.errors import ConfigError


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_bears_the_name_it_is_chosen_by(name):
    judge = make_judge(JudgeConfig(judge=name))
    assert judge.name == name
    assert judge.version


def test_an_unknown_judge_lists_the_choices():
    with pytest.raises(ConfigError, match=f"choose|{next(iter(JUDGES))}"):
        make_judge(JudgeConfig(judge="none_such"))
