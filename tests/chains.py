"""Chains of segments: a real conversation with a policy whose replies are scripted."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import OfferedTools
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.policy.summaries import SummaryConfig
from penstock.actors.policy.tokenizer import train_tokenizer
from penstock.actors.rollout_worker.conversation import Conversation
from penstock.envs.harness.tools import functions_of
from penstock.kernels.arrays import from_array
from penstock.kernels.route_segments import seal_routes
from penstock.messages.rollout import (
    EpisodeEnd,
    EpisodeFiles,
    RolloutFinished,
    StopReason,
    ToolCall,
    Trunk,
    Turn,
    TurnSampled,
    VersionSpan,
)
from penstock.messages.task import Limits, Purpose, Sampling, Split, Task

NUM_EXPERTS = 4
CHAT = PenstockChat(train_tokenizer(["Visit each file. Summary: a b c error"] * 4, 400))
POLICY = PolicyConfig(
    vocab_size=CHAT.tokenizer.vocab_size,
    num_hidden_layers=2,
    num_experts=NUM_EXPERTS,
    num_experts_per_tok=1,
    max_position_embeddings=1 << 14,
)
TOOLS = OfferedTools(words="Tools.", schemas=functions_of("1"))
INSTRUCTION = "Visit each file."


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the sampler saw and drew in one turn."""

    context: list[int]
    sampled: list[int]
    is_summary: bool
    room: int


@dataclass(kw_only=True)
class Chain:
    """One episode, turn by turn."""

    conversation: Conversation
    seen: list[Seen] = field(default_factory=list)
    observations: list[list[str]] = field(default_factory=list)
    """What each turn's calls returned."""

    @property
    def turns(self) -> list[Turn]:
        return self.conversation.turns

    def finished(self, name: str = "r", trunk: Trunk | None = None) -> RolloutFinished:
        return RolloutFinished(
            rollout_id=name, group_id="g", group_index=0, group_size=1, member=0,
            purpose=Purpose.TRAIN, task_id="t", category="c",
            end=self.conversation.end or EpisodeEnd.CANCELLED,
            turns=[turn.summary for turn in self.turns], files=EpisodeFiles(), trunk=trunk,
        )  # fmt: skip

    def events(self, name: str = "r") -> list[TurnSampled]:
        return [
            TurnSampled(
                rollout_id=name, group_id="g", purpose=Purpose.TRAIN, turn_index=index, turn=turn
            )
            for index, turn in enumerate(self.turns)
        ]


def conversation(summary: SummaryConfig | None = None, **limits: int) -> Conversation:
    task = Task(
        task_id="t", category="c", split=Split.TRAIN, instruction=INSTRUCTION, files={},
        limits=Limits(**{"num_tokens_max": 1 << 14, "turn_tokens_max": 64, **limits}),
    )  # fmt: skip
    return Conversation(CHAT, task, TOOLS, ends_on_parse_error=False, summary=summary)


def call(words: str) -> list[int]:
    """Return a turn that calls a tool."""
    return CHAT.render_turn("", [ToolCall(name="grep", arguments={"pattern": words})])


def say(text: str) -> list[int]:
    """Return a turn that says something and calls nothing."""
    return CHAT.render_turn(text)


def take(chain: Chain, token_ids: Sequence[int], results: Sequence[str] = ("",)) -> Turn:
    """Sample the next turn as given, cut where its room ends, and take what its calls return."""
    talk = chain.conversation
    room, context = talk.num_tokens_next_max, talk.token_ids
    ids = list(token_ids[:room])
    is_cut = len(ids) < len(token_ids)
    index = len(talk.turns)
    turn = talk.make_turn(sampled(ids, len(context), talk.routes_from, index, is_cut), Sampling())
    chain.seen.append(Seen(context=context, sampled=ids, is_summary=talk.is_summary, room=room))
    chain.observations.append(list(results))
    play(talk, turn, results)
    return turn


def play(talk: Conversation, turn: Turn, results: Sequence[str]) -> None:
    """Append a turn and, unless it needs none, what its calls returned."""
    talk.append(turn)
    if talk.end is None and not turn.is_summary:
        told = [f"error: {turn.parse_error}"] if turn.parse_error else list(results)[:1]
        talk.observe(told * max(len(turn.calls), 1), is_finished=False)


def sampled(
    ids: list[int], num_context: int, routes_from: int, index: int, is_cut: bool = False
) -> SampledTokens:
    """Return tokens as a generator samples them, with routes and a version that name the turn."""
    num_routes = num_context + len(ids) - 1 - routes_from
    routes = torch.full((num_routes, 2, 1), index % NUM_EXPERTS, dtype=torch.int16)
    place = {"policy_version": index, "first_position": routes_from}
    return SampledTokens(
        token_ids=ids,
        logprobs=[-0.5 - index] * len(ids),
        version_spans=[VersionSpan(policy_version=index, num_tokens=len(ids))],
        route_segments=[seal_routes(routes, num_experts=NUM_EXPERTS, **place)],
        stop_reason=StopReason.LENGTH if is_cut else StopReason.STOP,
    )


def ids_of(turn: Turn) -> tuple[list[int], list[int]]:
    """Return a turn's context and what was sampled."""
    return from_array(turn.context_ids).tolist(), from_array(turn.token_ids).tolist()


def branched(chain: Chain, num_turns: int, **changes: Any) -> tuple[RolloutFinished, list[Turn]]:
    """Return the chain as a branch that left another rollout after some turns."""
    turns = list(chain.turns)
    if num_turns < len(turns) and not turns[num_turns].starts_segment:
        seen = chain.seen[num_turns]
        again = sampled(seen.sampled, len(seen.context), 0, num_turns)
        turns[num_turns] = msgspec.structs.replace(
            turns[num_turns], route_segments=again.route_segments
        )
    event = chain.finished("b", Trunk(rollout_id="r", num_turns=num_turns))
    return msgspec.structs.replace(event, **changes), turns
