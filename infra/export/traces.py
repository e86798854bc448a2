"""`penstock export RUN --format traces`: solved rollouts as conversations for fine-tuning.

Only rollouts of training tasks: held-out ones would leak the tasks that measure the next run. Every
turn must have parsed. What tools returned is read back from the context's special tokens, so the
run's chat format has to be the built-in one.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from urllib.parse import quote

import msgspec

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ParsedTurn, Role
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
from penstock.actors.runtime.files import new_private_file, write_atomic
from penstock.envs.tasks.storage import load_tasks
from penstock.infra.config.file import load_config
from penstock.infra.corpora.atif import to_atif
from penstock.infra.corpora.traces_format import ChatTrace, TraceCall, TraceFunction, TraceMessage
from penstock.infra.run.runs import RunDir, open_log
from penstock.kernels.arrays import from_array
from penstock.messages.bus import Bus, ObjectStore
from penstock.messages.errors import ConfigError, CorruptDataError
from penstock.messages.reading.trajectories import last_of, read_turns, segments
from penstock.messages.reward import Outcome, Verdict
from penstock.messages.rollout import RolloutFinished, Turn
from penstock.messages.signals.episode_labels import EpisodeLabeled, EpisodeLabels
from penstock.messages.task import Purpose, Split


async def export_atif(run: RunDir, folder: Path) -> int:
    """Write the solved rollouts of a run's log as trajectories in ATIF; return how many.

    Raises:
        ConfigError: The run's chat format is another, or there is something at `folder`.
        CodecError: The log lacks a turn.

    """
    _check(run, folder)
    store = run.store()
    data = await store.get(TOKENIZER_KEY)
    chat = PenstockChat(Tokenizer.from_json(data.decode(), TOKENIZER_KEY))
    count = 0
    await asyncio.to_thread(folder.mkdir, parents=True)
    async with open_log(run, "export") as bus:
        async for trace in _traces(bus, store, chat):
            session = f"{trace.metadata['rollout_id']}-{count}"
            whole = msgspec.json.encode(to_atif(trace, session, trace.metadata["policy_version"]))
            write_atomic(folder / f"{quote(session, safe='')}.json", whole)
            count += 1
    return count


async def export_traces(run: RunDir, path: Path) -> int:
    """Write the solved rollouts of a run's log, one line each; return how many.

    Raises:
        ConfigError: The run's chat format is another, or there is something at `path`.
        CodecError: The log lacks a turn.

    """
    _check(run, path)
    store = run.store()
    data = await store.get(TOKENIZER_KEY)
    chat = PenstockChat(Tokenizer.from_json(data.decode(), TOKENIZER_KEY))
    count = 0
    async with open_log(run, "export") as bus:
        with new_private_file(path) as file:
            async for trace in _traces(bus, store, chat):
                file.write(msgspec.json.encode(trace) + b"\n")
                count += 1
    return count


def _check(run: RunDir, path: Path) -> None:
    chat_name = load_config(run.config).model.chat
    if chat_name != "penstock":
        text = "expected a run with model.chat 'penstock', whose contexts can be read back"
        raise ConfigError(f"--format traces: {text}; run {run.run_id} has {chat_name!r}")
    if path.exists():
        raise ConfigError(f"--output: {path} exists; name a new file")


async def _traces(
    bus: Bus, store: ObjectStore, chat: PenstockChat
) -> AsyncGenerator[ChatTrace, None]:
    """Yield solved rollouts in the order of the log."""
    instructions = {task.task_id: task.instruction for task in await load_tasks(store, Split.TRAIN)}
    solved: set[str] = set()
    finished: dict[str, RolloutFinished] = {}
    labels = EpisodeLabels()
    types = (RolloutFinished, Verdict, EpisodeLabeled)
    async for delivery in bus.follow(types, stop_at_end=True):
        match delivery.event:
            case RolloutFinished() as event if event.purpose is Purpose.TRAIN:
                finished[event.rollout_id] = event
            case Verdict() as event if event.outcome is Outcome.SOLVED:
                solved.add(event.rollout_id)
            case EpisodeLabeled() as event:
                labels.add(event)
            case _:
                pass
    for rollout in finished.values():
        instruction = instructions.get(rollout.task_id)
        if rollout.rollout_id not in solved or instruction is None:
            continue
        for trace in traces_of(chat, instruction, await read_turns(store, last_of(bus), rollout)):
            metadata = {"rollout_id": rollout.rollout_id, "task_id": rollout.task_id}
            metadata["policy_version"] = str(rollout.min_policy_version)
            if (label := labels.mean(rollout.rollout_id)) is not None:
                metadata["label"] = f"{label:g}"
            yield msgspec.structs.replace(trace, metadata=metadata)


def traces_of(chat: PenstockChat, instruction: str, turns: Sequence[Turn]) -> list[ChatTrace]:
    """Return an episode as conversations, one for each segment; none if a turn did not parse.

    Raises:
        CorruptDataError: A context is not what the chat format renders.

    """
    found: list[ChatTrace] = []
    for segment in segments(turns):
        opening = _opening(chat, segment[0]) if segment[0].starts_segment else instruction
        trace = _trace_of(chat, opening, segment)
        if trace is None:
            return []
        found.append(trace)
    return found


def _opening(chat: PenstockChat, turn: Turn) -> str:
    """Return what a later segment begins with: the task and the summary."""
    messages = chat.read_messages(from_array(turn.context_ids).tolist())
    if not messages or messages[-1].role is not Role.USER:
        raise CorruptDataError("a segment's first context does not end with a user's message")
    return messages[-1].content


def _trace_of(chat: PenstockChat, instruction: str, turns: Sequence[Turn]) -> ChatTrace | None:
    messages = [TraceMessage(role="user", content=instruction)]
    open_ids: list[str] = []
    for index, turn in enumerate(turns):
        if index:
            messages += _follows(chat, turn, open_ids, index)
        parsed = chat.parse_turn(from_array(turn.token_ids).tolist())
        if not isinstance(parsed, ParsedTurn):
            return None
        open_ids = [f"call_{index}_{number}" for number in range(len(parsed.calls))]
        calls = [
            TraceCall(id=i, function=TraceFunction(name=call.name, arguments=_json(call.arguments)))
            for i, call in zip(open_ids, parsed.calls, strict=True)
        ]
        messages.append(
            TraceMessage(role="assistant", content=parsed.text, tool_calls=calls or None)
        )
    return ChatTrace(messages=messages)


def _follows(
    chat: PenstockChat, turn: Turn, open_ids: Sequence[str], index: int
) -> list[TraceMessage]:
    """Return the results of the calls before a turn, and a request: a summary's, a next step's."""
    told = chat.read_messages(from_array(turn.context_ids).tolist())
    returned, asked = [Role.TOOL] * len(open_ids), [Role.USER]
    expected = [returned + asked] if turn.is_summary else [returned, returned + asked]
    if told is None or [message.role for message in told] not in expected:
        raise CorruptDataError(f"turn {index}: its context is no row of tool results")
    found = [
        TraceMessage(role="tool", tool_call_id=name, content=message.content)
        for name, message in zip(open_ids, told, strict=False)
    ]
    return found + [TraceMessage(role="user", content=one.content) for one in told[len(open_ids) :]]


def _json(arguments: dict[str, str]) -> str:
    return msgspec.json.encode(arguments).decode()
