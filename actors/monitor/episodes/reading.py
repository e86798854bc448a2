"""Reads one episode from the log and the object store, as text for people."""

import codecs
import difflib
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from penstock.actors.monitor.episodes.index import EpisodeIndex
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.envs.tasks.changes import Changes
from penstock.envs.tasks.set_ups import begun_with, own_changes, recorded_set_ups
from penstock.envs.tasks.storage import load_tasks
from penstock.envs.tasks.workspace import contents_at
from penstock.kernels.arrays import from_array
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import CodecError, NotFoundError
from penstock.messages.reading.trajectories import Last, load_files, load_turn, read_turn
from penstock.messages.requests.episodes import EpisodeRow
from penstock.messages.reward import CheatFinding, JudgeScore, Verdict
from penstock.messages.rollout import (
    EgressAttempt,
    RolloutFinished,
    ToolCall,
    Turn,
    VersionSpan,
)
from penstock.messages.signals.episode_labels import EpisodeLabeled
from penstock.messages.task import FileState, Purpose, Split, Task

TEXT_CHARS_MAX = 1 << 20
"""Longest text of a context, file or diff that is shown; the rest is cut and its length stated."""
_SPLITS = {Purpose.TRAIN: Split.TRAIN, Purpose.EVAL: Split.HELDOUT}


class TurnView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A turn as text. N is the number of sampled tokens."""

    index: int
    context: str = ""
    """Text added to the context since the last turn: the prompt, or the tools' results."""
    pieces: list[str] = []
    """[N] text of each sampled token; concatenated, the turn's text."""
    logprobs: list[float] = []
    """[N] logprobs under the distribution that the sampler drew from."""
    version_spans: list[VersionSpan] = []
    calls: list[ToolCall] = []
    parse_error: str = ""
    stop_reason: str = ""
    starts_segment: bool = False
    """Whether the context is the whole prompt of a new segment."""
    is_summary: bool = False
    is_withheld: bool = False
    missing: str = ""
    """Reason why there is no text, such as a payload that was garbage-collected."""


class VerdictView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Verdict of the judges on an episode."""

    judge: str
    outcome: str
    reward: float
    components: dict[str, float] = {}
    num_tests: int = 0
    num_tests_passed: int = 0
    detail: str = ""
    scores: list[JudgeScore] = []
    findings: list[CheatFinding] = []


class LabelView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Label that a person gave to an episode."""

    labeler: str
    value: float
    """Rating from 0 (bad) to 1 (good)."""
    comment: str = ""


class EpisodeView(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A complete episode as text."""

    row: EpisodeRow
    instruction: str = ""
    """Instruction of the task; empty if the run's tasks do not include it."""
    turns: list[TurnView] = []
    diff: str = ""
    """Unified diff from the files as the task's set-ups left them to those at the episode's end."""
    files_missing: str = ""
    """Reason why there is no diff."""
    verdict: VerdictView | None = None
    labels: list[LabelView] = []
    """Latest label of each labeler."""
    error: str = ""
    """Infrastructure error that ended the episode; empty if there was none."""
    egress: list[EgressAttempt] = []
    group: list[EpisodeRow] = []
    """Rows of all episodes of the group at the same task, including this one."""


class EpisodeReader:
    """Reader of episodes; caches the run's tokenizer and tasks."""

    def __init__(self, store: ObjectStore, last: Last) -> None:
        self._store = store
        self._last = last
        self._tokenizer: Tokenizer | None = None
        self._tasks: dict[Split, Mapping[str, Task]] = {}

    async def read(self, rollout_id: str, index: EpisodeIndex) -> EpisodeView:
        """Return an episode; parts whose payload is gone state why.

        Raises:
            NotFoundError: The log has no finished episode of that id.
            CodecError: The run's tokenizer or tasks cannot be read.

        """
        event = await self._last(RolloutFinished, rollout_id)
        if event is None:
            raise NotFoundError(f"episode {rollout_id}: the log has no finished episode of that id")
        # The index is bounded; an old episode has only what its own events say.
        row = index.find(rollout_id) or EpisodeRow(rollout_id=rollout_id, group_id=event.group_id)
        task = await self._task(event)
        verdict = await self._last(Verdict, f"{rollout_id}.{row.judge}") if row.judge else None
        diff, missing = await self._diff(event, task)
        return EpisodeView(
            row=row,
            instruction=task.instruction if task else "",
            turns=[await self._turn(event, index) for index in range(len(event.turns))],
            diff=diff,
            files_missing=missing,
            verdict=_verdict(verdict) if verdict else None,
            labels=[await self._label(label) for label in index.labels.of(rollout_id)],
            error=event.error,
            egress=event.egress,
            group=index.group(event.group_id, event.task_id),
        )

    async def _label(self, label: EpisodeLabeled) -> LabelView:
        # The index drops comments to save memory; the log still has them.
        whole = await self._last(EpisodeLabeled, label.key()) or label
        return LabelView(labeler=label.labeler, value=label.value or 0.0, comment=whole.comment)

    async def _turn(self, event: RolloutFinished, index: int) -> TurnView:
        try:
            turn = await load_turn(self._store, await read_turn(self._last, event, index))
        except CodecError as error:
            return TurnView(index=index, missing=str(error))
        return turn_view(index, turn, await self._decoder())

    async def _decoder(self) -> Tokenizer:
        if self._tokenizer is None:
            data = await self._store.get(TOKENIZER_KEY)
            self._tokenizer = Tokenizer.from_json(data.decode("utf-8", "replace"), TOKENIZER_KEY)
        return self._tokenizer

    async def _task(self, event: RolloutFinished) -> Task | None:
        split = _SPLITS.get(event.purpose)
        if split is None:
            return None
        if split not in self._tasks:
            found = await load_tasks(self._store, split)
            self._tasks[split] = {task.task_id: task for task in found}
        return self._tasks[split].get(event.task_id)

    async def _diff(self, event: RolloutFinished, task: Task | None) -> tuple[str, str]:
        try:
            changed = await load_files(self._store, event.files)
            by_step = await recorded_set_ups(self._store, self._last, task) if task else []
        except CodecError as error:
            return "", str(error)
        step = len(event.step_ends)
        contents = contents_at(task, step) if task else {}
        made = by_step[step] if step < len(by_step) else {}
        left = Changes(files=changed.changed, deleted=event.deleted, states=changed.states)
        own = own_changes(left, contents, made)
        before = begun_with(contents, made)
        return unified_diff(before, own.files, own.deleted, own.states), ""


def turn_view(index: int, turn: Turn, tokenizer: Tokenizer) -> TurnView:
    """Return a turn as text."""
    ids = from_array(turn.token_ids).tolist()
    return TurnView(
        index=index,
        context=shortened(tokenizer.decode(from_array(turn.context_ids).tolist())),
        pieces=pieces(ids, tokenizer),
        logprobs=np.round(from_array(turn.behavior_logprobs), 4).astype(float).tolist(),
        version_spans=turn.version_spans,
        calls=turn.calls,
        parse_error=turn.parse_error,
        stop_reason=turn.stop_reason,
        starts_segment=turn.starts_segment,
        is_summary=turn.is_summary,
        is_withheld=turn.is_withheld,
    )


def pieces(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Return the text of each token.

    If a character spans several tokens, the last of them has its text and the others are empty.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    last = len(ids) - 1
    return [
        decoder.decode(tokenizer.bytes_of(token), final=place == last)
        for place, token in enumerate(ids)
    ]


def unified_diff(
    before: Mapping[str, bytes],
    changed: Mapping[str, bytes],
    deleted: Sequence[str],
    states: Iterable[FileState] = (),
) -> str:
    """Return an episode's changes in the format of `diff -u`.

    Of binary files there is only the size; of what else a file is, one line.
    """
    lines: list[str] = []
    for path in sorted({*changed, *deleted}):
        data, had = changed.get(path, b""), before.get(path, b"")
        try:
            old, new = had.decode().splitlines(), data.decode().splitlines()
        except UnicodeDecodeError:
            lines.append(f"{path}: binary file of {len(data)} bytes ({len(had)} before)")
            continue
        source = path if path in before else "/dev/null"
        target = "/dev/null" if path in deleted else path
        lines += difflib.unified_diff(old, new, source, target, lineterm="")
    lines += [one.shown for one in states]
    return shortened("\n".join(lines))


def shortened(text: str) -> str:
    """Return the first `TEXT_CHARS_MAX` characters, with a note of how many are cut."""
    num_cut = len(text) - TEXT_CHARS_MAX
    return f"{text[:TEXT_CHARS_MAX]}\n[{num_cut} more characters]" if num_cut > 0 else text


def _verdict(event: Verdict) -> VerdictView:
    return VerdictView(
        judge=event.judge,
        outcome=event.outcome,
        reward=event.reward,
        components=event.components,
        num_tests=event.num_tests,
        num_tests_passed=event.num_tests_passed,
        detail=shortened(event.detail),
        scores=event.scores,
        findings=event.findings,
    )
