"""Demonstrations of trails for mid-training: each segment of an episode is one document.

They go through the same conversation and the same tools as rollouts, so requests for summaries,
restarts and observations are those that the policy will meet.
"""

import asyncio
import random
from collections.abc import Iterator

import msgspec

from penstock import (
    ConfigError,
    Corpora,
    CorpusBuilder,
    CorpusRequest,
    Limits,
    PenstockChat,
    Split,
    ToolSession,
    tools_prompt,
    train_tokenizer,
)
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.policy.summaries import MARK, SummaryConfig, SummaryMode
from penstock.actors.rollout_worker.conversation import Conversation, offered_tools
from penstock.kernels.arrays import from_array
from penstock.messages.rollout import EpisodeEnd, StopReason, Turn
from penstock.messages.task import Sampling

from ..ladder.dry_run import DryRunSandbox
from ..midtrain_data import add_drills
from ..settings import TrailCorpora
from .config import TrailTasks
from .tasks import Trail, draw_trails
from .walker import Walker

Document = tuple[list[int], list[float]]
"""Token ids, and how much each counts as a target."""
_HELDOUT_EVERY = 20
_NUM_TOKENIZED = 500


def trail_corpora(request: CorpusRequest) -> Corpora:
    """Return the tokenizer and both corpora of a run on trails; for `[prepare.corpora]`.

    Raises:
        ConfigError: Wrong settings, a trail that does not fit its limits, or too few.
        PreparationStoppedError: Nobody waits for them any more.

    """
    if request.corpora:
        raise ConfigError("model.corpora: expected none with trails, which have their own")
    return TrailDemonstrations(request).corpora()


class TrailDemonstrations:
    """Episodes of one who walks trails, as documents."""

    def __init__(self, request: CorpusRequest) -> None:
        self._request, self._config = request, request.settings(TrailCorpora)
        config = self._config
        self._trail = config.trail or request.source_settings(config.source, TrailTasks)
        self._summary = msgspec.structs.replace(request.summary, mode=SummaryMode.TRAINED)
        self._rng = random.Random(f"trails/{request.seed}")

    def corpora(self) -> Corpora:
        """Return them; equal requests give equal bytes; errors as `trail_corpora`."""
        request, config = self._request, self._config
        trails = list(request.until_stopped(self._draw()))
        words = [self._summary.request, MARK, "Summary 0:", "answer.txt", "done"]
        words += [text for one in trails[:_NUM_TOKENIZED] for text in _texts(one, request.harness)]
        tokenizer = train_tokenizer(words, request.vocab_size)
        train, heldout, chat = CorpusBuilder(), CorpusBuilder(), PenstockChat(tokenizer)
        add_drills(train, tokenizer, request.seed, config)
        for index, trail in enumerate(request.until_stopped(trails)):
            builder = train if index % _HELDOUT_EVERY else heldout
            for ids, weights in self._documents(trail, chat):
                builder.add(ids, weights)
        if train.is_empty or heldout.is_empty:
            text = f"expected at least 2, one of them to hold out, got {config.num_demonstrations}"
            raise ConfigError(f"{request.field}.num_demonstrations: {text}")
        return Corpora(tokenizer, train, heldout)

    def _draw(self) -> Iterator[Trail]:
        num, limits = self._config.num_demonstrations, self._request.limits
        return draw_trails(Split.TRAIN, num, self._trail, limits, self._rng, "demo")

    def _documents(self, trail: Trail, chat: PenstockChat) -> Iterator[Document]:
        habits = self._trail.habits
        limits: Limits = trail.task.limits
        if self._rng.random() < habits.whole_share:
            limits = msgspec.structs.replace(limits, num_segments_max=1, window_tokens_max=0)
        walker = Walker(trail, habits, self._rng)
        turns = asyncio.run(
            walked(trail, walker, limits, chat, self._summary, self._request.harness)
        )
        weight = self._config.context_weight
        ids: list[int] = []
        weights: list[float] = []
        for turn in turns:
            if turn.starts_segment:
                yield ids, weights
                ids, weights = [], []
            context, sampled = from_array(turn.context_ids), from_array(turn.token_ids)
            ids = ids + context.tolist() + sampled.tolist()
            weights = weights + [weight] * context.size + [1.0] * sampled.size
        yield ids, weights


async def walked(  # noqa: PLR0913, PLR0917 - all of an episode
    trail: Trail,
    walker: Walker,
    limits: Limits,
    chat: PenstockChat,
    summary: SummaryConfig,
    harness: str,
) -> list[Turn]:
    """Return the turns of one demonstration.

    Raises:
        ConfigError: It met one of its limits.

    """
    task = msgspec.structs.replace(trail.task, limits=limits)
    tools = offered_tools(harness)
    conversation = Conversation(chat, task, tools, ends_on_parse_error=True, summary=summary)
    session = ToolSession(harness, DryRunSandbox(task.files), limits, pages=task.pages)
    while conversation.end is None:
        is_summary = conversation.is_summary
        text = f"{MARK} {walker.summary()}" if is_summary else ""
        calls = [] if is_summary else walker.calls()
        ids = chat.render_turn(text, calls, tools)
        if len(ids) > conversation.num_tokens_next_max:
            break
        sampled = SampledTokens(
            token_ids=ids, logprobs=[0.0] * len(ids), stop_reason=StopReason.STOP
        )
        conversation.append(conversation.make_turn(sampled, Sampling()))
        if not is_summary:
            results = await session.run(calls)
            walker.see([result.text for result in results])
            is_finished = any(result.is_finish for result in results)
            conversation.observe([result.text for result in results], is_finished=is_finished)
    if conversation.end is not EpisodeEnd.FINISHED:
        why = conversation.end or "a turn longer than what is left"
        text = (
            f"{task.task_id}: a demonstration ends by {why} after {len(conversation.turns)} turns"
        )
        raise ConfigError(f"prepare.limits, rollout_worker.summary: {text}")
    return conversation.turns


def _texts(trail: Trail, harness: str) -> list[str]:
    return [tools_prompt(harness), trail.task.instruction, *trail.task.pages.values(), trail.answer]
