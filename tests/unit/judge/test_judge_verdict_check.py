"""Replay composes rewards again by the settings that the run had, wherever its log is."""

from types import SimpleNamespace

import pytest

from penstock.actors.judge.reward import Findings, reward_components
from penstock.infra.commands.log import imported_config
from penstock.infra.config.file import parse_config
from penstock.infra.run.verdict_check import VerdictCheck, recorded_judge
from penstock.messages.control import RunStarted
from penstock.messages.errors import ConfigError
from penstock.messages.reading.parsing import parse_toml
from penstock.messages.reward import JudgeScore, Lengths, Outcome, Verdict
from penstock.messages.task import Purpose

CONFIG = """
[judge.length_penalty]
turn = 0.5
[[judge.judges]]
name = "taste"
weight = 0.1
criteria = [{ name = "minimal", text = "Is it minimal?" }]
[judge.judges.endpoint]
url = "https://judge.example/v1"
model = "m"
"""


class OneEvent:
    """A log that begins with a run's configuration."""

    def __init__(self, config_toml: str) -> None:
        self.event = RunStarted(run_id="r", seed=0, config_toml=config_toml, versions={})

    async def last(self, kind):
        return SimpleNamespace(event=self.event) if kind is RunStarted else None


async def test_an_imported_run_is_checked_by_its_own_settings() -> None:
    imported = parse_config(parse_toml(imported_config(CONFIG, "file"), "file"), "file")
    assert imported.judge.judges == [], "an endpoint of a stranger's file stays out"
    judge = await recorded_judge(OneEvent(CONFIG), imported.judge)
    score = JudgeScore(judge="taste", version="1", criterion="minimal", score=1.0, repeats=1)
    lengths = Lengths(num_turns=3)
    findings = Findings(outcome=Outcome.SOLVED, scores=[score], lengths=lengths)
    components = reward_components(findings, judge)
    assert components["judge.taste"] == pytest.approx(0.1)
    verdict = Verdict(
        rollout_id="r", group_id="g", group_index=0, purpose=Purpose.TRAIN, judge="hidden_tests",
        judge_version="1", outcome=Outcome.SOLVED, reward=sum(components.values()),
        components=components, scores=[score], lengths=lengths,
    )  # fmt: skip
    found = {}
    for name, config in {"log": judge, "folder": imported.judge}.items():
        check = VerdictCheck(config)
        check.add(verdict)
        found[name] = check.num_different
    assert found == {"log": 0, "folder": 1}


async def test_wrong_settings_of_a_log_are_named() -> None:
    own = parse_config(parse_toml(imported_config("", "file"), "file"), "file").judge
    with pytest.raises(ConfigError, match=r"RunStarted.config_toml: judge: .*partial_credit"):
        await recorded_judge(OneEvent("[judge]\npartial_credit = 7"), own)
