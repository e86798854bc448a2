"""Every judge can be chosen by its name."""

import pytest

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.judges import JUDGES, make_judge


@pytest.mark.parametrize("name", JUDGES)
def test_a_judge_bears_the_name_it_is_chosen_by(name):
    judge = make_judge(JudgeConfig(judge=name))
    assert judge.name == name
    assert judge.version
