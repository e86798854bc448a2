"""How the scores of several judges become one reward: the tests decide, others add."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge_service import make_rubric

from penstock.actors.judge.config import AuxiliaryConfig, JudgeConfig, LengthPenaltyConfig
from penstock.actors.judge.reward import Findings, recompose, reward_components
from penstock.actors.judge.rubric.config import CriterionConfig
from penstock.messages.errors import ConfigError
from penstock.messages.reward import JudgeScore, Lengths, Outcome, Verdict
from penstock.messages.task import Purpose

CRITERIA = [
    CriterionConfig(name="right", text="?", weight=3.0),
    CriterionConfig(name="clear", text="?", weight=1.0),
]
UNIT = st.floats(0.0, 1.0)


def make_config(**changes) -> JudgeConfig:
    fields = {
        "judges": [make_rubric(criteria=CRITERIA, weight=0.1)],
        "auxiliary": AuxiliaryConfig(style=0.05, todos=0.05),
    }
    return JudgeConfig(**{**fields, **changes})


def score(judge: str, value: float | None, criterion: str = "") -> JudgeScore:
    return JudgeScore(judge=judge, version="1", criterion=criterion, score=value)


@st.composite
def found_things(draw: st.DrawFn) -> Findings:
    """Draw what judges may find out about a graded rollout."""
    outcome = draw(st.sampled_from([Outcome.SOLVED, Outcome.FAILED]))
    part = None if outcome is Outcome.SOLVED else draw(st.none() | UNIT)
    names = [("quality", "right"), ("quality", "clear"), ("style", ""), ("todos", ""), ("x", "y")]
    scores = [score(judge, draw(st.none() | UNIT), of) for judge, of in names]
    lengths = Lengths(final=draw(st.integers(0, 10**6)), num_turns=draw(st.integers(0, 1000)))
    return Findings(outcome=outcome, score=part, scores=scores, lengths=lengths)


@given(found_things(), found_things(), st.booleans())
def test_no_judge_lifts_a_failed_rollout_to_a_solved_one(one, other, scores_failed) -> None:
    config = make_config(scores_failed=scores_failed)
    rewards = {each.outcome: sum(reward_components(each, config).values()) for each in (one, other)}
    assert all(reward >= config.reward_min for reward in rewards.values())
    if len(rewards) == 2:
        assert rewards[Outcome.FAILED] < rewards[Outcome.SOLVED]


@given(
    st.floats(-2, 2), st.floats(-2, 2), UNIT, st.floats(0, 1), st.floats(0.001, 2), st.floats(0, 1)
)
def test_settings_keep_every_failed_rollout_below_every_solved_one_or_are_refused(
    solved, failed, partial, penalty_max, weight, style
) -> None:
    try:
        config = JudgeConfig(
            reward_solved=solved,
            reward_failed=failed,
            reward_min=-10.0,
            partial_credit=partial,
            length_penalty=LengthPenaltyConfig(penalty_max=penalty_max),
            judges=[make_rubric(weight=weight)],
            auxiliary=AuxiliaryConfig(style=style),
            scores_failed=True,
        )
    except ConfigError:
        return
    best = [score("quality", 1.0, "right"), score("style", 1.0)]
    worst = [score("quality", 0.0, "right"), score("style", 0.0)]
    highest = Findings(outcome=Outcome.FAILED, score=0.999, scores=best)
    lowest = Findings(outcome=Outcome.SOLVED, scores=worst, lengths=Lengths(final=1 << 30))
    failed_max, solved_min = (
        sum(reward_components(one, config).values()) for one in (highest, lowest)
    )
    assert failed_max < solved_min


def test_a_judges_part_is_its_weight_times_the_weighted_mean_of_its_criteria() -> None:
    scores = [score("quality", 1.0, "right"), score("quality", 0.0, "clear"), score("style", 0.5)]
    parts = reward_components(Findings(outcome=Outcome.SOLVED, scores=scores), make_config())
    assert parts["judge.quality"] == pytest.approx(0.1 * 0.75)
    assert parts["auxiliary.style"] == pytest.approx(0.05 * 0.5)
    assert "auxiliary.todos" not in parts


def test_a_judge_that_failed_at_one_criterion_adds_nothing() -> None:
    scores = [score("quality", 1.0, "right"), score("quality", None, "clear")]
    parts = reward_components(Findings(outcome=Outcome.SOLVED, scores=scores), make_config())
    assert set(parts) == {"tests", "length_penalty"}


@pytest.mark.parametrize(
    "outcome", [Outcome.FAILED, Outcome.POLICY_ERROR, Outcome.TIMEOUT, Outcome.JUDGE_ERROR]
)
def test_what_is_not_solved_gets_nothing_from_judges(outcome: Outcome) -> None:
    best = [score("quality", 1.0, name) for name in ("right", "clear")]
    for scores_failed in (False, True):
        config = make_config(scores_failed=scores_failed)
        parts = reward_components(Findings(outcome=outcome, scores=best), config)
        assert ("judge.quality" in parts) == (scores_failed and outcome is Outcome.FAILED)


def test_partial_credit_is_in_proportion_to_the_verifiers_reward() -> None:
    for part, expected in ((None, {}), (0.0, {}), (0.5, {"partial": 0.25})):
        parts = reward_components(Findings(outcome=Outcome.FAILED, score=part), JudgeConfig())
        assert parts == {"tests": 0.0} | expected


@given(found_things(), st.booleans())
def test_a_verdict_is_composed_again_from_what_it_records(found: Findings, scores_failed) -> None:
    config = make_config(scores_failed=scores_failed)
    components = reward_components(found, config)
    verdict = Verdict(
        rollout_id="r", group_id="g", group_index=0, purpose=Purpose.TRAIN, judge="hidden_tests",
        judge_version="5", outcome=found.outcome, reward=sum(components.values()),
        components=components, score=found.score, scores=found.scores, lengths=found.lengths,
    )  # fmt: skip
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(verdict), type=Verdict)
    assert recompose(read, config) == components
    assert sum(read.components.values()) == read.reward


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"judges": [make_rubric(weight=0.3)]},
            "earns more than a solved one, got 0.9 and 0.8",
        ),
        (
            {"auxiliary": AuxiliaryConfig(style=0.4)},
            "earns more than a solved one",
        ),
        ({"partial_credit": 0.8}, "earns more than a solved one"),
        ({"judges": [make_rubric(weight=0.01)] * 2}, "each name once, got quality, quality"),
        (
            {"judges": [make_rubric(name=f"j{n}", weight=0.01) for n in range(9)]},
            "at most 8 judges",
        ),
    ],
)
def test_weights_that_could_override_the_tests_are_refused(changes: dict, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_config(**changes)
