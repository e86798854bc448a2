"""People's labels to compare a judge with: lines of JSON, or the labels of a run's log.

    {"criterion": "clear", "choice": "yes", "task": "...", "diff": "...", "final": "..."}

A line's `choice` is one of the criterion's, word for word. Labels of a log (`messages.signals`)
say of a served reply whether it was good: their context is the task, the reply the final message,
and good is the criterion's best choice, not good its worst.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from penstock.actors.judge.rubric.config import CriterionConfig, RubricConfig
from penstock.actors.judge.submission import Submission
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.infra.corpora.lines import read_lines
from penstock.infra.export.preferences import PreferenceReader, standing
from penstock.infra.run.runs import RunDir, open_log
from penstock.infra.run.vault import open_vault
from penstock.messages.bus import Bus
from penstock.messages.errors import ConfigError
from penstock.messages.reading.trajectories import last_of
from penstock.messages.signals.preferences import Label

LABELS_MAX = 100_000


class HumanLabel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line: what a person chose for a piece of work."""

    criterion: str
    choice: str
    task: str = ""
    diff: str = ""
    final: str = ""
    turns: str = ""

    def submission(self, number: int) -> Submission:
        """Return the work."""
        return Submission(
            sample_id=f"label-{number}",
            task=self.task,
            diff=self.diff,
            final=self.final,
            turns=self.turns,
        )


def read_labels(path: Path, judge: RubricConfig) -> list[HumanLabel]:
    """Return the labels of a file that are of a judge's criteria.

    Raises:
        ConfigError: A line is none, or its choice is none of the criterion's; or there are none.

    """
    criteria = {one.name: one for one in judge.criteria}
    found: list[HumanLabel] = []
    for place, label in read_lines(path, HumanLabel, "--labels"):
        criterion = criteria.get(label.criterion)
        if criterion is None:
            continue
        if label.choice not in criterion.choices:
            choices = ", ".join(map(repr, criterion.choices))
            text = f"expected one of {choices}, got {label.choice!r}"
            raise ConfigError(f"--labels: {place}: choice: {text}")
        if not (label.diff or label.final):
            raise ConfigError(f"--labels: {place}: expected a diff or a final message")
        found.append(label)
        if len(found) > LABELS_MAX:
            raise ConfigError(f"--labels: {path}: expected at most {LABELS_MAX} labels")
    if not found:
        names = ", ".join(criteria)
        raise ConfigError(f"--labels: {path}: expected labels of the criteria {names}, found none")
    return found


async def logged_labels(run: RunDir, criterion: CriterionConfig) -> list[HumanLabel]:
    """Return what users of a run said of replies, as labels of one criterion.

    Raises:
        ConfigError: The log has none that can be read.

    """
    async with open_log(run, "judge") as bus:
        store = run.store()
        text = (await store.get(TOKENIZER_KEY)).decode()
        tokenizer = Tokenizer.from_json(text, TOKENIZER_KEY)
        reader = PreferenceReader(store, open_vault(run), last_of(bus), tokenizer, chat=None)
        found = await standing_labels(bus, reader, criterion)
    if not found:
        raise ConfigError(f"--run: {run.run_id}: its log has no label that can be read")
    return found


async def standing_labels(
    bus: Bus, reader: PreferenceReader, criterion: CriterionConfig
) -> list[HumanLabel]:
    """Return the labels of a log that count and whose content can still be read."""
    best, worst = _ends(criterion.choices)
    found: list[HumanLabel] = []
    labels = [one for one in await standing(bus) if isinstance(one, Label)]
    for label in labels[:LABELS_MAX]:
        line = await reader.line(label)
        if line is not None:
            found.append(
                HumanLabel(
                    criterion=criterion.name,
                    choice=best if label.is_desirable else worst,
                    task=line["prompt"],
                    final=line["completion"],
                )
            )
    return found


def _ends(choices: Mapping[str, float]) -> tuple[str, str]:
    """Return the best and the worst choice."""
    return max(choices, key=lambda one: choices[one]), min(choices, key=lambda one: choices[one])


def by_criterion(
    labels: Sequence[HumanLabel],
) -> Iterator[tuple[str, list[tuple[int, HumanLabel]]]]:
    """Yield each criterion with its labels, numbered over all."""
    for name in dict.fromkeys(label.criterion for label in labels):
        yield name, [(n, one) for n, one in enumerate(labels) if one.criterion == name]
