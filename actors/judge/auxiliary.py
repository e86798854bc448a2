"""Manners of an episode, scored from 0 to 1 by counting: style, communication, to-dos. Pure.

None of it says whether the work is right: it is added to the reward of what was graded, with small
weights (`judge.auxiliary`).
"""

import re
from collections.abc import Callable, Iterator

from pyflakes.checker import Checker

from penstock.actors.judge.config import AuxiliaryConfig
from penstock.actors.judge.submission import ChangedFile, Submission
from penstock.envs.python_source import PythonSourceError, parse_python
from penstock.messages.reward import JudgeScore

VERSION = "1"
LINTED_CHARS_MAX = 64 << 10
"""Of one file; a longer one counts as one lint."""
_SHOWN_MAX = 3
_TODO = re.compile(r"\b(T[O]DO|F[I]XME|X[X]X)\b|^\s*[-*+] \[ \] ")
_BOX = re.compile(r"^\s*(?:[-*+]|\d+[.)]) \[( |x|X)\] ", re.MULTILINE)
_STEM_CHARS_MIN = 3


def auxiliary_scores(submission: Submission, config: AuxiliaryConfig) -> list[JudgeScore]:
    """Return the scores of those that have a weight."""
    return [_SCORERS[name](submission) for name in config.weights]


def style(submission: Submission) -> JudgeScore:
    """Score lints (pyflakes) in the lines that the episode wrote: 1 / (1 + their number)."""
    lints = [lint for file in submission.files for lint in _lints(file)]
    return _counted("style", lints)


def todos(submission: Submission) -> JudgeScore:
    """Score to-dos in the lines that it wrote, and what is open in its own last plan."""
    left = [
        f"{file.path}:{number}: {line.strip()[:60]}"
        for file in submission.files
        for number, line in file.added_lines()
        if _TODO.search(line)
    ]
    left += ["open in its plan"] * _BOX.findall(submission.message).count(" ")
    return _counted("todos", left)


def communication(submission: Submission) -> JudgeScore:
    """Score the final message: half for being there, half for the changed files that it names."""
    words = submission.message.casefold()
    if not words:
        return JudgeScore(judge="communication", version=VERSION, score=0.0, repeats=1)
    unnamed = [file.path for file in submission.files if not _names(words, file.path)]
    share = 1.0 - len(unnamed) / len(submission.files) if submission.files else 1.0
    detail = f"not named: {', '.join(unnamed[:_SHOWN_MAX])}" if unnamed else ""
    score = 0.5 + 0.5 * share
    return JudgeScore(judge="communication", version=VERSION, score=score, repeats=1, detail=detail)


_SCORERS: dict[str, Callable[[Submission], JudgeScore]] = {
    "style": style,
    "communication": communication,
    "todos": todos,
}


def _counted(judge: str, found: list[str]) -> JudgeScore:
    shown = "; ".join(found[:_SHOWN_MAX])
    detail = f"{len(found)}: {shown}" if found else ""
    score = 1.0 / (1.0 + len(found))
    return JudgeScore(judge=judge, version=VERSION, score=score, repeats=1, detail=detail)


def _names(words: str, path: str) -> bool:
    """Return whether a text names a file: its name, or its stem where that is a word."""
    name = path.rsplit("/", 1)[-1].casefold()
    stem = name.partition(".")[0]
    if name in words:
        return True
    is_word = re.search(rf"(?<!\w){re.escape(stem)}(?!\w)", words)
    return len(stem) >= _STEM_CHARS_MIN and is_word is not None


def _lints(file: ChangedFile) -> Iterator[str]:
    if file.after is None or not file.path.endswith(".py"):
        return
    if len(file.after) > LINTED_CHARS_MAX:
        yield f"{file.path}: too long to be linted"
        return
    added = {number for number, _ in file.added_lines()}
    try:
        found = Checker(parse_python(file.after), file.path, withDoctest=False).messages
    except (PythonSourceError, RecursionError) as error:
        yield f"{file.path}: {type(error).__name__}"
        return
    for one in found:
        if one.lineno in added:
            yield f"{file.path}:{one.lineno}: {one.message % one.message_args}"
