"""What judges other than tests see of an episode: its changes and its messages. Pure.

All of it is untrusted text by the policy, a tool or a task's author.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec

from penstock.actors.judge.set_ups import own_changes
from penstock.actors.policy.chat.format import ChatFormat, OfferedTools, ParsedTurn
from penstock.envs.tasks.storage import GradedTask
from penstock.kernels.arrays import from_array
from penstock.messages.reading.trajectories import Trajectory
from penstock.messages.rollout import Turn

_CONTEXT_LINES = 3
_OPENINGS = (
    *("solution", "answer", "final answer", "the answer", "result", "output", "response"),
    *("thought process", "reasoning", "explanation", "analysis", "thinking", "done"),
    *("lets solve this problem step by step", "let us solve this problem step by step"),
    *("lets think step by step", "let us think step by step", "step 1", "first"),
    *("解", "解答", "答案", "かいせつ", "解説", "respuesta", "solución", "lösung", "réponse"),
)
"""Empty phrases that models mistake for an answer ("One Token to Fool LLM-as-a-Judge",
arXiv 2507.08794)."""
_OPENING = re.compile("|".join(sorted(map(re.escape, _OPENINGS), key=len, reverse=True)))
_NOT_WORDS = re.compile(r"[\W_]+")
_APOSTROPHES = re.compile(r"['\u2019]")


class ChangedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file that an episode changed, added or deleted."""

    path: str
    before: str | None
    """Former text; None if the file is new, or was part of the image, which is not kept."""
    after: str | None
    """Present text; None if the file was deleted."""

    def added_lines(self) -> list[tuple[int, str]]:
        """Return (number from 1, line) of the new lines."""
        left = Counter((self.before or "").splitlines())
        added: list[tuple[int, str]] = []
        for number, line in enumerate((self.after or "").splitlines(), 1):
            # As a multiset: a line that only moved is not an added one.
            if left[line] > 0:
                left[line] -= 1
            else:
                added.append((number, line))
        return added

    def diff(self) -> str:
        """Return a diff of one hunk, from the first to the last line that differs."""
        # Linear time, unlike difflib: the policy chooses both texts.
        old, new = (self.before or "").splitlines(), (self.after or "").splitlines()
        start = next(
            (n for n, (a, b) in enumerate(zip(old, new, strict=False)) if a != b),
            min(len(old), len(new)),
        )
        rest = min(len(old), len(new)) - start
        pairs = zip(reversed(old), reversed(new), strict=False)
        ends = next((n for n, (a, b) in enumerate(pairs) if n >= rest or a != b), rest)
        first, last_old, last_new = start - _CONTEXT_LINES, len(old) - ends, len(new) - ends
        lines = [f"--- {self.path if self.before is not None else '(not there)'}"]
        lines.append(f"+++ {self.path if self.after is not None else '(deleted)'}")
        lines += [f" {line}" for line in new[max(0, first) : start]]
        lines += [f"-{line}" for line in old[start:last_old]]
        lines += [f"+{line}" for line in new[start:last_new]]
        lines += [f" {line}" for line in new[last_new : last_new + _CONTEXT_LINES]]
        return "\n".join(lines)


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One episode, as judges see it."""

    sample_id: str
    task: str = ""
    files: list[ChangedFile] = []
    diff: str = ""
    """All changes as one text."""
    final: str = ""
    """Final message as sent."""
    turns: str = ""
    """Transcript: messages, calls and results."""

    @property
    def message(self) -> str:
        """Final message; empty if it is only an empty phrase."""
        return self.final if says_something(self.final) else ""

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a message nor a change."""
        return not (self.message or self.diff)

    def section(self, name: str) -> str:
        """Return one of `rubric.config.SECTIONS`."""
        return self.message if name == "final" else str(getattr(self, name))


def says_something(text: str) -> bool:
    """Return whether words remain once empty phrases and punctuation are removed."""
    words = _NOT_WORDS.sub(" ", _APOSTROPHES.sub("", text.casefold())).strip()
    return bool(_NOT_WORDS.sub("", _OPENING.sub(" ", words)))


def read_submission(rollout: Trajectory, task: GradedTask, chat: ChatFormat) -> Submission:
    """Return what judges see of an episode, with the changes of its last step."""
    task = task.at_step(len(rollout.finished.step_ends))
    files = list(_changed_files(rollout, task))
    return Submission(
        sample_id=rollout.finished.rollout_id,
        task=task.task.instruction,
        files=files,
        diff="\n".join([*(file.diff() for file in files), *_told_states(rollout)]),
        final=final_message(rollout.turns, chat),
        turns="\n".join(_told(rollout.turns, chat)),
    )


def final_message(turns: Sequence[Turn], chat: ChatFormat) -> str:
    """Return the text of a last turn without calls, or the answer of its `finish` call."""
    if not turns or turns[-1].parse_error or turns[-1].is_summary:
        return ""
    text = _text_of(turns[-1], chat)
    calls = turns[-1].calls
    if not calls:
        return text
    answers = [call.arguments.get("answer", "") for call in calls if call.name == "finish"]
    return "\n".join([text, *answers]).strip() if answers else ""


def _changed_files(rollout: Trajectory, task: GradedTask) -> Iterator[ChangedFile]:
    rollout = own_changes(rollout, task)
    before = {path: data.decode("utf-8", "replace") for path, data in task.begun_with.items()}
    for path in sorted({*rollout.files, *rollout.finished.deleted}):
        data = rollout.files.get(path)
        after = None if data is None else data.decode("utf-8", "replace")
        yield ChangedFile(path=path, before=before.get(path), after=after)


def _told_states(rollout: Trajectory) -> list[str]:
    """Return what changed of files besides their content, one line each."""
    return [f"*** {one.shown}" for one in rollout.states]


def _told(turns: Sequence[Turn], chat: ChatFormat) -> Iterator[str]:
    for index, turn in enumerate(turns):
        if turn.starts_segment:
            yield "[a new context begins, with the task and the summary]"
        elif index:
            yield f"[returned] {chat.tokenizer.decode(from_array(turn.context_ids).tolist())}"
        yield f"[turn {index}] {_text_of(turn, chat)}"
        for call in turn.calls:
            arguments = "\n".join(f"  {name}: {value}" for name, value in call.arguments.items())
            yield f"[call] {call.name}\n{arguments}"


def _text_of(turn: Turn, chat: ChatFormat) -> str:
    token_ids = from_array(turn.token_ids).tolist()
    parsed = chat.parse_turn(token_ids, from_array(turn.context_ids).tolist(), OfferedTools())
    return parsed.text if isinstance(parsed, ParsedTurn) else chat.tokenizer.decode(token_ids)
