"""Demonstrations of trails for mid-training: each segment of an episode is one document.

They go through the same conversation and the same tools as rollouts, so requests for summaries,
restarts and observations are those that the policy will meet.
"""

import asyncio
import random
import threading
from collections.abc import Iterator

import msgspec
import numpy as np

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatFormat
from penstock.actors.policy.sampling import SampledTokens
from penstock.actors.policy.summaries import MARK, SummaryConfig, SummaryMode
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, train_tokenizer
from penstock.actors.rollout_worker.conversation import Conversation, offered_tools
from penstock.envs.harness.session import Session
from penstock.envs.harness.tools import tools_prompt
from penstock.envs.ladder.dry_run import DryRunSandbox
from penstock.envs.trail.config import TrailConfig
from penstock.envs.trail.tasks import Trail, draw_trails
from penstock.envs.trail.walker import Walker
from penstock.infra.corpora.builder import CorpusBuilder, Document, corpora_built, until
from penstock.infra.quickstart.config import PrepareConfig
from penstock.infra.quickstart.midtrain_data import add_drills
from penstock.kernels.arrays import from_array
from penstock.messages.errors import ConfigError
from penstock.messages.rollout import EpisodeEnd, StopReason, Turn
from penstock.messages.task import Limits, Sampling, Split

_HELDOUT_EVERY = 20
_NUM_TOKENIZED = 500


class TrailCorpus:
    """Tokenizer and both corpora of a run on trails.

    Args:
        config: The run's preparation.
        trail: Its trails.
        summary: How rollouts are asked for summaries.
        vocab_size: Of the tokenizer.
        seed: Decides everything else.

    """

    def __init__(
        self,
        config: PrepareConfig,
        trail: TrailConfig,
        summary: SummaryConfig,
        vocab_size: int,
        seed: int,
    ) -> None:
        self._config, self._trail, self._vocab_size, self._seed = config, trail, vocab_size, seed
        self._summary = msgspec.structs.replace(summary, mode=SummaryMode.TRAINED)
        self._rng = random.Random(f"trails/{seed}")

    def objects(self, stopped: threading.Event) -> dict[str, bytes]:
        """Return them by their keys; equal arguments give equal bytes.

        Raises:
            ConfigError: A trail does not fit its limits, or there are too few.
            PreparationStoppedError: `stopped` was set meanwhile.

        """
        config = self._config
        trails = list(until(stopped, self._draw()))
        words = [self._summary.request, MARK, "Summary 0:", "answer.txt", "done"]
        words += [text for one in trails[:_NUM_TOKENIZED] for text in _texts(one, config.harness)]
        tokenizer = train_tokenizer(words, self._vocab_size)
        train, heldout, chat = CorpusBuilder(), CorpusBuilder(), PenstockChat(tokenizer)
        drills = np.random.default_rng([self._seed, config.drill_tokens])
        add_drills(train, tokenizer, drills, config.drill_tokens, config.drill_half_tokens)
        for index, trail in enumerate(until(stopped, trails)):
            builder = train if index % _HELDOUT_EVERY else heldout
            for ids, weights in self._documents(trail, chat):
                builder.add(ids, weights)
        text = f"expected at least 2, one of them to hold out, got {config.num_demonstrations}"
        built = corpora_built(train, heldout, f"prepare.num_demonstrations: {text}")
        return {TOKENIZER_KEY: tokenizer.to_json().encode()} | built

    def _draw(self) -> Iterator[Trail]:
        num, limits = self._config.num_demonstrations, self._config.limits
        return draw_trails(Split.TRAIN, num, self._trail, limits, self._rng, "demo")

    def _documents(self, trail: Trail, chat: ChatFormat) -> Iterator[Document]:
        habits = self._trail.habits
        limits: Limits = trail.task.limits
        if self._rng.random() < habits.whole_share:
            limits = msgspec.structs.replace(limits, num_segments_max=1, window_tokens_max=0)
        walker = Walker(trail, habits, self._rng)
        turns = asyncio.run(walked(trail, walker, limits, chat, self._summary, self._config))
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
    chat: ChatFormat,
    summary: SummaryConfig,
    config: PrepareConfig,
) -> list[Turn]:
    """Return the turns of one demonstration.

    Raises:
        ConfigError: It met one of its limits.

    """
    task = msgspec.structs.replace(trail.task, limits=limits)
    tools = offered_tools(config.harness)
    conversation = Conversation(chat, task, tools, ends_on_parse_error=True, summary=summary)
    session = Session(config.harness, DryRunSandbox(task.files), limits, pages=task.pages)
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
