"""The calibration file of a judge, and the check against a run's required agreement."""

from pathlib import Path

import msgspec

from penstock.actors.judge.config import JudgeConfig
from penstock.actors.judge.rubric.config import RubricConfig
from penstock.actors.judge.rubric.question import rubric_digest
from penstock.actors.runtime.files import read_small
from penstock.infra.judge.agreement import Agreement
from penstock.messages.errors import CodecError, ConfigError
from penstock.messages.reading.parsing import parse_json

FILE_BYTES_MAX = 1 << 20


class Calibration(msgspec.Struct, frozen=True, kw_only=True):
    """Result of `penstock judge calibrate` for one judge."""

    judge: str
    digest: str
    """Digest of the rubric and settings, which ties the result to the judge."""
    answered_by: list[str]
    """Model names that the service reported."""
    criteria: dict[str, Agreement]
    num_failed: int = 0
    """Labels without a score, because the service failed; they are not counted."""
    num_prompt_tokens: int = 0
    num_reply_tokens: int = 0


def check_calibration(config: JudgeConfig) -> None:
    """Check that every rubric judge agrees with people as a run requires.

    Raises:
        ConfigError: A judge agrees too little or is not calibrated; the text names it.

    """
    if config.calibration_min > 0.0:
        for judge in config.judges:
            _check(judge, config.calibration_min)


def _check(judge: RubricConfig, agreement_min: float) -> None:
    field = f"judge.judges.{judge.name}.calibration"
    if not judge.calibration:
        text = "expected a file of penstock judge calibrate, as judge.calibration_min is set"
        raise ConfigError(f"{field}: {text}")
    found = _read(Path(judge.calibration), field)
    digest = rubric_digest(judge)
    # A result says nothing about a judge with another rubric, model or prompt.
    if found.digest != digest:
        text = f"is of another judge, {found.digest}, not {digest}; calibrate this one"
        raise ConfigError(f"{field}: {judge.calibration} {text}")
    for criterion in judge.criteria:
        measured = found.criteria.get(criterion.name)
        if measured is None:
            raise ConfigError(f"{field}: {judge.calibration} has no labels of {criterion.name}")
        # The lower end: a few lucky labels must not admit a judge.
        if measured.agreement.lower < agreement_min:
            raise ConfigError(
                f"{field}: {criterion.name}: agrees with people in {measured.agreement.value:.1%} "
                f"of {measured.num} labels, at least {measured.agreement.lower:.1%} with 95% "
                f"confidence; expected judge.calibration_min {agreement_min:.1%}"
            )


def _read(path: Path, field: str) -> Calibration:
    try:
        return parse_json(read_small(path, FILE_BYTES_MAX), Calibration, str(path))
    except (ConfigError, CodecError) as error:
        raise ConfigError(f"{field}: {error}") from error
