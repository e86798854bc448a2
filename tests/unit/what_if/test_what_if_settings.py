"""What may be asked of a log, the run that evaluates the answer, and its report."""

import json
from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.judge_service import make_rubric

from penstock.actors.judge.config import AuxiliaryConfig, LengthPenaltyConfig
from penstock.actors.judge.reward import LENGTH_PENALTY
from penstock.infra.config.file import load_config, parse_config, read_toml
from penstock.infra.what_if.command import evaluation_tables, render
from penstock.infra.what_if.settings import read_question, reward_function
from penstock.messages.errors import ConfigError
from penstock.messages.reward import Lengths, Outcome, Verdict
from penstock.messages.task import Purpose

CONFIGS = Path(__file__).parents[3] / "infra/configs"
QUICKSTART = CONFIGS.parents[1] / "examples/quickstart/config.toml"
FOUR = "../../tests/lab/regions/four-regions.toml"


@pytest.fixture(scope="module")
def config():
    return load_config(QUICKSTART)


def verdict(**fields) -> Verdict:
    return Verdict(
        rollout_id="r", group_id="g", group_index=0, purpose=Purpose.TRAIN, judge="hidden_tests",
        judge_version="1", outcome=Outcome.SOLVED, **fields,
    )  # fmt: skip


def test_settings_of_the_trainer_are_changed_in_each_step_s_own(config):
    given = ["trainer.loss.name=ppo_clip", "trainer.loss.correction=none", "trainer.estimator=rloo"]
    question = read_question(given, config)
    other = msgspec.structs.replace(config.trainer, checkpoint_steps=77)
    changed = question.change(other)
    assert (changed.loss.name, changed.estimator, changed.checkpoint_steps) == (
        "ppo_clip", "rloo", 77
    )  # fmt: skip
    assert changed.optimizer == config.trainer.optimizer
    assert question.judge is None and reward_function(question, config) is None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("trainer.staleness_max=4", "expected one of trainer.loss.*"),
        ("pacer.group_size=4", "other settings decided what was sampled"),
        ("trainer.loss", "expected KEY=VALUE"),
        ("trainer.loss.name=x", r"trainer: .*loss.name"),
        ("trainer.loss.nam=x", "unknown field `nam`"),
        ("trainer.loss.name=ppo_clip", "trainer.loss.correction: expected none"),
        ("trainer.estimator=x", "estimator"),
        ("judge.auxiliary.style=0.1", "the run gave it no weight"),
        ("judge.judges.taste.weight=0.1", "expected of this run none: it has no"),
        ("judge.reward_solved=-5", "expected reward_min <="),
        ("judge.reward_solved=inf", "judge: Expected `float` <= "),
        ("judge.length_penalty.scale=inf", "judge: Expected `float` <= "),
        ("judge.judge=other", "expected one of"),
    ],
)
def test_what_a_log_cannot_answer_is_refused(config, given, expected):
    with pytest.raises(ConfigError, match=rf"--what-if .*{expected}"):
        read_question([given], config)


def test_rewards_are_composed_again_with_other_weights(config):
    own = msgspec.structs.replace(
        config.judge,
        length_penalty=LengthPenaltyConfig(scale=0.1, q=0.0, k=0.0),
        auxiliary=AuxiliaryConfig(style=0.05),
    )
    config = msgspec.structs.replace(config, judge=own)
    lengths = Lengths(num_turns=2)
    recorded = verdict(
        lengths=lengths, components={"tests": 1.0, LENGTH_PENALTY: -0.02}, reward=0.98
    )
    given = ["judge.length_penalty.scale=0.2", "judge.auxiliary.style=0"]
    reward = reward_function(read_question(given, config), config)
    assert reward(recorded) == pytest.approx(1.0 - 0.04)
    stranger = msgspec.structs.replace(recorded, lengths=None)
    with pytest.raises(ConfigError, match="rewards of such a log cannot be composed with others"):
        reward(stranger)


@pytest.mark.parametrize("name", [QUICKSTART, FOUR, "sft-then-rl.toml"])
def test_the_run_that_evaluates_takes_no_step_and_keeps_tasks_and_machines(name, tmp_path):
    tables = read_toml(CONFIGS / name)
    own = parse_config(read_toml(CONFIGS / name), str(name))
    path = tmp_path / "evaluation.toml"
    path.write_text(tomli_w.dumps(evaluation_tables(tables, Path("/model"))))
    config = load_config(path)
    assert (config.trainer.steps_max, config.pacer.steps_max) == (0, 0)
    assert (config.model.checkpoint, config.users.num_requests) == ("/model", 0)
    assert config.model.corpora == () and config.trainer.midtrain.num_tokens == 0
    for section in ("prepare", "judge", "evaluator", "sandbox_host"):
        assert getattr(config, section) == getattr(own, section)
    assert config.run.seed == own.run.seed
    assert config.bus.servers == [] and config.gateway.port == 0


def test_the_report_has_the_answer_and_no_markup_from_it():
    answer = {"run_id": "</script><b>", "what_if": ["trainer.estimator=rloo"], "steps": {}}
    page = render(answer)
    assert "</script><b>" not in page and "/*" not in page.split("<script>")[0].split("<style>")[0]
    text = page.split("const answer = ", 1)[1].split(";\n", 1)[0]
    assert json.loads(text) == answer


@pytest.mark.parametrize("weight", ["-5", "-inf", "0", "inf", "nan", "much"])
def test_a_judge_s_weight_is_a_number_above_zero(config, weight):
    judge = msgspec.structs.replace(config.judge, judges=[make_rubric()])
    config = msgspec.structs.replace(config, judge=judge)
    with pytest.raises(ConfigError, match=r"quality\.weight=.*: expected a number above 0"):
        read_question([f"judge.judges.quality.weight={weight}"], config)
