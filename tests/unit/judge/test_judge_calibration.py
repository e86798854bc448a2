"""Judges beside people: figures by hand, files of labels, and the refusal of poor judges."""

import argparse
import itertools
import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.judge_service import JudgeService, make_rubric
from tests.unit.judge.test_judge_attacks import CONFIG

from penstock.actors.judge.config import JudgeConfig
from penstock.infra.config.file import load_config
from penstock.infra.judge.agreement import Judgment, cohens_kappa, expected_error, measure, wilson
from penstock.infra.judge.calibration import check_calibration
from penstock.infra.judge.command import judge_command
from penstock.messages.errors import ConfigError

YES_NO = {"yes": 1.0, "no": 0.0}


def judgments(table: dict[tuple[str, str], int]) -> list[Judgment]:
    each = (
        [Judgment(human=human, judge=judge, score=YES_NO.get(judge, 0.5))] * count
        for (human, judge), count in table.items()
    )
    return list(itertools.chain(*each))


def test_kappa_by_hand() -> None:
    table = {("yes", "yes"): 20, ("yes", "no"): 5, ("no", "yes"): 10, ("no", "no"): 15}
    assert cohens_kappa(judgments(table)) == pytest.approx(0.4)
    found = measure(judgments(table), YES_NO)
    assert found.agreement.value == pytest.approx(0.7)
    assert found.confusion == {"yes": {"yes": 20, "no": 5}, "no": {"yes": 10, "no": 15}}
    assert found.brier is not None and found.brier.value == pytest.approx(0.3)
    assert found.kappa.lower < 0.4 < found.kappa.upper


def test_calibration_error_by_hand() -> None:
    pairs = [(0.9, 1.0), (0.9, 0.0), (0.2, 0.0), (0.2, 0.0)]
    assert expected_error(pairs) == pytest.approx(0.5 * 0.4 + 0.5 * 0.2)
    assert expected_error([(1.0, 1.0), (0.0, 0.0)]) == 0.0


def test_wilsons_interval_by_hand() -> None:
    found = wilson(8, 10)
    assert (found.lower, found.upper) == (
        pytest.approx(0.4902, abs=1e-4),
        pytest.approx(0.9433, abs=1e-4),
    )
    assert wilson(0, 0).upper == 1.0


@given(st.integers(0, 200), st.integers(0, 200))
def test_an_interval_holds_its_share(hits: int, misses: int) -> None:
    found = wilson(hits, hits + misses)
    assert 0.0 <= found.lower <= found.value + 1e-12 and found.value <= found.upper + 1e-12 <= 1.1


def test_graded_choices_have_no_calibration_error() -> None:
    graded = {"fully": 1.0, "in part": 0.5, "no": 0.0}
    found = measure([Judgment(human="fully", judge="in part", score=0.5)], graded)
    assert found.brier is None and found.ece is None


def label(choice: str, right: bool, criterion: str = "right") -> str:
    return json.dumps({"criterion": criterion, "choice": choice, "task": "t", "diff": f"+{right}"})


def sees_true(body: dict) -> str:
    return "A" if "+True" in body["messages"][1]["content"] else "B"


async def calibrated(tmp_path, lines: list[str], reply=sees_true, **changes):
    """Run the command; return its result and the configuration, with the service's address."""
    service = JudgeService(reply)
    async with service.serving():
        file, labels = tmp_path / "run.toml", tmp_path / "labels.jsonl"
        file.write_text(CONFIG.replace("URL", service.url))
        labels.write_text("\n".join(lines))
        fields = {
            "judge": "", "overrides": [], "json": True, "labels": labels, "run": None,
            "criterion": "", "output": tmp_path / "found.json",
        }  # fmt: skip
        await judge_command(
            argparse.Namespace(action="calibrate", config=file, **{**fields, **changes})
        )
    return load_config(file).judge


LABELS = [label("yes", True)] * 30 + [label("no", False)] * 28 + [label("no", True)] * 2


async def test_a_calibration_admits_the_judge_that_it_is_of(tmp_path, capsys) -> None:
    config = await calibrated(tmp_path, [*LABELS, label("yes", True, "other"), ""])
    found = json.loads(capsys.readouterr().out)
    assert found["criteria"]["right"]["num"] == 60 and found["answered_by"] == ["m-2026"]
    assert found["criteria"]["right"]["agreement"]["value"] == pytest.approx(58 / 60)
    assert found == json.loads((tmp_path / "found.json").read_text())
    [judge] = config.judges

    def demand(agreement_min: float, **changes) -> JudgeConfig:
        calibration = str(tmp_path / "found.json")
        changed = msgspec.structs.replace(judge, **{"calibration": calibration, **changes})
        return JudgeConfig(judges=[changed], calibration_min=agreement_min)

    check_calibration(demand(0.85))
    check_calibration(demand(0.0, calibration=""))
    with pytest.raises(
        ConfigError, match=r"agrees with people in 96\.7% of 60 labels, at least 88"
    ):
        check_calibration(demand(0.9))
    with pytest.raises(ConfigError, match="is of another judge"):
        check_calibration(demand(0.5, repeats=3))
    with pytest.raises(ConfigError, match="expected a file of penstock judge calibrate"):
        check_calibration(demand(0.5, calibration=""))
    with pytest.raises(ConfigError, match="No such file"):
        check_calibration(demand(0.5, calibration=str(tmp_path / "none.json")))
    (tmp_path / "found.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"found\.json of 2 bytes: .*missing required field"):
        check_calibration(demand(0.5))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([label("maybe", True)], r":1: choice: expected one of 'yes', 'no', got 'maybe'"),
        (['{"criterion": "right", "choice": "yes"}'], ":1: expected a diff or a final message"),
        ([label("yes", True), '{"criterion": "right"}'], ":2: .*missing required field `choice`"),
        (["not json"], ":1: JSON is malformed"),
        ([label("yes", True, "other")], "expected labels of the criteria right, found none"),
        ([], "expected labels of the criteria right, found none"),
    ],
)
async def test_labels_that_are_none_are_refused_by_line(tmp_path, lines, expected) -> None:
    with pytest.raises(ConfigError, match=expected):
        await calibrated(tmp_path, lines)


async def test_a_judge_that_answers_nothing_has_no_calibration(tmp_path) -> None:
    with pytest.raises(ConnectionError, match="criterion right: no score"):
        await calibrated(tmp_path, LABELS, reply=lambda _body: 401)
    assert not (tmp_path / "found.json").exists()


def test_a_run_with_a_poor_judge_is_refused_before_it_starts(tmp_path) -> None:
    with pytest.raises(ConfigError, match="calibration_min is set"):
        check_calibration(JudgeConfig(judges=[make_rubric()], calibration_min=0.5))
