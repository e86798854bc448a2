"""A run's groups for an audit, and what it flagged: a file beside the run's summary.

RUN/audit.json    by rollout: who named it, and how often; `penstock show RUN EPISODE` shows it
"""

from collections import defaultdict
from collections.abc import Sequence

import msgspec

from penstock.actors.judge.rubric.contrast import ATTEMPTS_MAX, JudgedAttempt
from penstock.actors.judge.submission import read_submission
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.chat.open import open_chat
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.runtime.files import write_atomic
from penstock.envs.tasks.set_ups import recorded_set_ups
from penstock.envs.tasks.storage import TaskBook
from penstock.infra.judge.audit import GroupAudit
from penstock.infra.run.config_file import load_config
from penstock.infra.run.runs import RunDir, open_log
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import CodecError, NotFoundError
from penstock.messages.reading.parsing import parse_json
from penstock.messages.reading.trajectories import last_of, read_trajectory
from penstock.messages.reward import CheatFinding, CheatKind, Outcome, Verdict
from penstock.messages.rollout import RolloutFinished
from penstock.messages.task import Purpose

_GRADED = {Outcome.SOLVED, Outcome.FAILED}
Group = list[JudgedAttempt]


class RunAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit of a run found."""

    judge: str
    num_groups: int
    """Those that the judge answered on."""
    num_failed: int
    num_attempts: int
    num_solved: int
    num_flagged: int
    num_flagged_solved: int
    """Those with the reward of a solved task."""
    num_prompt_tokens: int
    num_reply_tokens: int
    flags: dict[str, CheatFinding]
    """By rollout."""
    failure: str = ""
    """Of one of the groups that the judge did not answer on."""


async def read_groups(run: RunDir, num_max: int) -> list[Group]:
    """Return the newest training groups with two graded attempts or more that can still be read.

    Of a larger group the first `ATTEMPTS_MAX` attempts count.
    """
    config = load_config(run.config)
    async with open_log(run, "judge") as bus:
        store = run.store()
        text = (await store.get(TOKENIZER_KEY)).decode()
        chat = open_chat(config.model.chat, Tokenizer.from_json(text, TOKENIZER_KEY))
        return await groups_in(bus, store, chat, num_max)


async def groups_in(bus: Bus, store: ObjectStore, chat: ChatFormat, num_max: int) -> list[Group]:
    """Return the groups of a log, as `read_groups` does."""
    last, tasks = last_of(bus), TaskBook()
    groups: list[Group] = []
    for verdicts in reversed(await _graded(bus)):
        group: Group = []
        for verdict in sorted(verdicts, key=lambda one: one.group_index)[:ATTEMPTS_MAX]:
            try:
                rollout = await last(RolloutFinished, verdict.rollout_id)
                if rollout is None:
                    continue
                task = await tasks.find(store, Purpose.TRAIN, rollout.task_id)
                trajectory = await read_trajectory(store, last, rollout)
                made = await recorded_set_ups(store, last, task.task)
            except (CodecError, NotFoundError):  # Collected or erased since.
                continue
            task = msgspec.structs.replace(task, made=made)
            submission = read_submission(trajectory, task, chat)
            is_solved = verdict.outcome is Outcome.SOLVED
            group.append(JudgedAttempt(submission=submission, is_solved=is_solved))
        if len(group) > 1:
            groups.append(group)
        if len(groups) >= num_max:
            break
    return groups


async def _graded(bus: Bus) -> list[list[Verdict]]:
    """Return the graded training rollouts by group, in the order of the groups' first verdicts."""
    groups = defaultdict[str, list[Verdict]](list)
    async for delivery in bus.follow((Verdict,), stop_at_end=True):
        event = delivery.event
        if not isinstance(event, Verdict) or event.outcome not in _GRADED:
            continue
        if event.purpose is Purpose.TRAIN:
            groups[event.group_id].append(event)
    return list(groups.values())


def report(judge: str, groups: Sequence[Group], audits: Sequence[GroupAudit]) -> RunAudit:
    """Return the figures and flags of groups and what came of each."""
    answered = [pair for pair in zip(groups, audits, strict=True) if pair[1].shares]
    attempts = [one for group, _ in answered for one in group]
    flagged = [
        (group[number], found.shares[number], len(group) - 1, found.answered_by)
        for group, found in answered
        for number in sorted(found.flagged)
    ]
    flags = {
        one.submission.sample_id: CheatFinding(
            kind=CheatKind.CONTRAST,
            where=f"beside {num_others} attempts",
            detail=f"judge {judge} ({answered_by}): {share:.0%} of its replies",
        )
        for one, share, num_others, answered_by in flagged
    }
    return RunAudit(
        judge=judge,
        num_groups=len(answered),
        num_failed=len(groups) - len(answered),
        num_attempts=len(attempts),
        num_solved=sum(one.is_solved for one in attempts),
        num_flagged=len(flagged),
        num_flagged_solved=sum(one.is_solved for one, *_ in flagged),
        num_prompt_tokens=sum(one.num_prompt_tokens for one in audits),
        num_reply_tokens=sum(one.num_reply_tokens for one in audits),
        flags=flags,
        failure=next((one.failure for one in audits if not one.shares), ""),
    )


def write_audit(run: RunDir, found: RunAudit) -> None:
    """Keep an audit with its run; it takes the place of an earlier one."""
    write_atomic(run.audit, msgspec.json.format(msgspec.json.encode(found)) + b"\n")


def audit_flag(run: RunDir, rollout_id: str) -> CheatFinding | None:
    """Return what an audit says of a rollout, if there was one that flagged it.

    Raises:
        CodecError: The file is damaged.

    """
    if not run.audit.exists():
        return None
    found = parse_json(run.audit.read_bytes(), RunAudit, str(run.audit))
    return found.flags.get(rollout_id)
