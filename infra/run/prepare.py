"""Builds what a run starts from, for its configuration and seed, into its object store.

Tasks and their hidden tests of both splits (`envs/tasks/storage.py`); and the tokenizer and the
corpora of mid-training, or a checkpoint and its own corpora (`infra/models/claim.py`,
`infra/corpora/own.py`). The same settings and seed give the same bytes. Importing this module
imports no torch.
"""

import asyncio
import logging
import random
import threading
from collections.abc import Callable, Sequence
from typing import cast

import msgspec

from penstock.actors.policy.chat.builtin import PenstockChat
from penstock.actors.policy.chat.format import ChatFormat, OfferedTools
from penstock.actors.policy.hf.stored import INDEX_KEY
from penstock.actors.policy.tokenizer import TOKENIZER_KEY
from penstock.actors.rollout_worker.conversation import Conversation, offered_tools
from penstock.actors.sandbox_host.config import PoolConfig
from penstock.actors.trainer.preferences.examples import PREFERENCES_KEY
from penstock.envs.backends import backend_class
from penstock.envs.harness.tools import tools_prompt
from penstock.envs.needs import fit_machine_size, resolve_machine_size
from penstock.envs.sandbox import NeedsRefused
from penstock.envs.tasks.choice import eligible_tasks
from penstock.envs.tasks.source import TaskCandidate
from penstock.envs.tasks.storage import hidden_tests_key, task_objects, tasks_key
from penstock.infra.config.checks import check_window
from penstock.infra.config.settings import RunConfig
from penstock.infra.corpora.builder import (
    MIDTRAIN_HELDOUT_KEY,
    MIDTRAIN_KEY,
    corpora_built,
    until,
)
from penstock.infra.corpora.kept import kept_corpora
from penstock.infra.corpora.own import add_corpora, corpus_objects
from penstock.infra.corpora.preferences import preference_objects
from penstock.infra.corpora.request import Corpora, CorpusRequest
from penstock.infra.models.claim import claim_model, open_model
from penstock.infra.tasks.settings import CorporaConfig
from penstock.infra.tasks.sources import drawn_tasks
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError
from penstock.messages.reading.references import load_reference
from penstock.messages.task import Split, Task

log = logging.getLogger(__name__)
TASK_KEYS = tuple(key(split) for key in (tasks_key, hidden_tests_key) for split in Split)
CORPUS_KEYS = (MIDTRAIN_KEY, MIDTRAIN_HELDOUT_KEY)


async def prepare(
    config: RunConfig,
    store: ObjectStore,
    say: Callable[[str], None],
    note_cached: Callable[[str], None] = log.info,
) -> None:
    """Put all objects unless all are there; cancelled, it ends soon, and has put none.

    Args:
        config: What to build.
        store: Of the run.
        say: Called with progress in words.
        note_cached: Called with what was taken from the user's cache, in words.

    Raises:
        ConfigError: A file that `[model]` names is missing or broken, or a task does not fit the
            engine's context.

    """
    if all([await store.exists(key) for key in _object_keys(config)]):
        return
    section = config.model
    stopped = threading.Event()
    try:
        if section.checkpoint:
            say(f"preparing {config.prepare.num_train_tasks} tasks, from {section.checkpoint}")
            chat = await asyncio.to_thread(open_model, section, config.policy)
            objects = await asyncio.to_thread(build_outside, config, chat, stopped)
        else:
            counts = f"{config.prepare.num_train_tasks} tasks"
            say(f"preparing {counts} and corpora of mid-training")
            objects = await asyncio.to_thread(build, config, stopped, note_cached)
    finally:
        stopped.set()  # A thread cannot be cancelled: it looks at this before each task and text.
    for key, data in objects.items():
        await store.put(key, data)
    if section.checkpoint:
        await claim_model(section, config.policy, store)


def build(
    config: RunConfig, stopped: threading.Event, note_cached: Callable[[str], None] = log.info
) -> dict[str, bytes]:
    """Return every object of a run that starts from random weights, by its key.

    Raises:
        ConfigError: A task does not fit the engine's context, or the own code of
            `prepare.corpora` is not there or makes no corpora.
        PreparationStoppedError: `stopped` was set meanwhile.

    """
    objects = _task_sets(config, stopped)
    section = config.prepare.corpora
    if section is None:
        text = "expected own code that makes the tokenizer and what mid-training reads"
        raise ConfigError(f"prepare.corpora: {text}, or model.checkpoint")
    make = cast(
        "Callable[[CorpusRequest], object]", load_reference(section.make, "prepare.corpora.make")
    )
    request = corpus_request(config, section, stopped)
    longest = config.trainer.midtrain.sequence_tokens

    def made() -> dict[str, bytes]:
        return _midtrain_objects(make(request), request, section.make, longest)

    if request.corpora or not config.trainer.midtrain.uses_cache:
        return objects | made()
    facts = (
        *(request.seed, request.vocab_size, request.harness, request.limits, request.summary),
        *(request.given, request.sources, longest),
    )
    found, is_kept = kept_corpora(facts, section.make, made)
    if is_kept:
        note_cached("tokenizer and corpora of mid-training")
    return objects | found


def corpus_request(
    config: RunConfig, section: CorporaConfig, stopped: threading.Event
) -> CorpusRequest:
    """Return what the run asks own code for."""
    prepare = config.prepare
    return CorpusRequest(
        seed=config.run.seed,
        vocab_size=config.policy.vocab_size,
        harness=prepare.harness,
        limits=prepare.limits,
        summary=config.rollout_worker.summary,
        given=section.settings,
        sources={each.name: each.settings for each in prepare.sources if each.make},
        corpora=config.model.corpora,
        stopped=stopped,
    )


def _midtrain_objects(
    made: object, request: CorpusRequest, make: str, tokens_max: int
) -> dict[str, bytes]:
    """Return the tokenizer and both corpora by their keys, `model.corpora` last among these."""
    if not isinstance(made, Corpora):
        text = f"expected Corpora, got {type(made).__name__}"
        raise ConfigError(f"prepare.corpora.make: {make!r}: {text}")
    chat = PenstockChat(made.tokenizer)
    tools = OfferedTools(words=tools_prompt(request.harness))
    builders = (made.train, made.heldout)
    add_corpora(request.corpora, chat, tools, tokens_max, request.stopped, builders)
    text = f"{make!r}: expected a document to train and one to hold out, or model.corpora"
    built = corpora_built(*builders, f"prepare.corpora.make: {text}")
    return {TOKENIZER_KEY: made.tokenizer.to_json().encode()} | built


def build_outside(
    config: RunConfig, chat: ChatFormat, stopped: threading.Event
) -> dict[str, bytes]:
    """Return the tasks and corpora of a run that starts from a checkpoint, by key.

    Raises:
        ConfigError: Texts or traces that are broken, or a task that does not fit.
        PreparationStoppedError: `stopped` was set meanwhile.

    """
    objects = _task_sets(config, stopped, chat)
    if config.model.has_corpus:
        tools = offered_tools(config.pacer.harness)
        tokens_max = config.trainer.midtrain.sequence_tokens
        objects |= corpus_objects(config.model.corpora, chat, tools, tokens_max, stopped)
    if config.model.preferences:
        longest = config.policy.max_position_embeddings
        tools = offered_tools(config.pacer.harness)
        objects |= preference_objects(config.model.preferences, chat, tools, longest)
    return objects


def _object_keys(config: RunConfig) -> tuple[str, ...]:
    """Return the keys that a prepared store has."""
    has_corpus = config.model.has_corpus or not config.model.checkpoint
    keys = (TOKENIZER_KEY, *TASK_KEYS, *(CORPUS_KEYS if has_corpus else ()))
    if config.model.preferences:
        keys = (*keys, PREFERENCES_KEY)
    return (*keys, INDEX_KEY) if config.model.checkpoint else keys


def _task_sets(
    config: RunConfig, stopped: threading.Event, chat: ChatFormat | None = None
) -> dict[str, bytes]:
    section = config.prepare
    objects: dict[str, bytes] = {}
    for split, candidates in drawn_tasks(section, config.run.seed).items():
        fitting = [
            _slowed(_checked(one, config, chat), config) for one in until(stopped, candidates)
        ]
        if split is Split.HELDOUT:
            _check_eval_sets([one.task for one in fitting], config)
        objects |= task_objects(fitting, split)
    return objects


def _check_eval_sets(heldout: Sequence[Task], config: RunConfig) -> None:
    """Refuse an evaluation set that no held-out task is in.

    Raises:
        ConfigError: There is one; the text names it, and what there is.

    """
    for each in config.evaluator.sets:
        if not eligible_tasks(heldout, each.sources, each.categories):
            sources = sorted({task.source for task in heldout})
            categories = sorted({task.category for task in heldout})
            text = f"there are tasks of the sources {sources} and the categories {categories}"
            asked = f"{each.sources or 'all'} and {each.categories or 'all'}"
            raise ConfigError(f"evaluator.sets.{each.name}: expected some of {text}, got {asked}")


def _checked(one: TaskCandidate, config: RunConfig, chat: ChatFormat | None) -> TaskCandidate:
    """Refuse a task whose longest episode, or whose prompt, does not fit.

    Raises:
        ConfigError: It does not; the text names the task and both numbers.

    """
    task, limits = one.task, one.task.limits
    _check_machine(task, config.sandbox_host.pool)
    check_window(limits, config, f"task {task.task_id}: limits")
    if chat is not None:
        tools = offered_tools(config.pacer.harness)
        opening = Conversation(chat, task, tools, ends_on_parse_error=True)
        longest = limits.window_tokens_max or limits.num_tokens_max
        if opening.end is not None:
            raise ConfigError(
                f"task {task.task_id}: its prompt has {len(opening.token_ids)} tokens with the "
                f"tools, and its longest context is {longest}"
            )
    return one


def _slowed(one: TaskCandidate, config: RunConfig) -> TaskCandidate:
    """Return a task whose machines sleep, where the settings want slow ones."""
    slow = config.prepare.slow_calls
    if slow is None:
        return one
    sleep_s = slow.draw(random.Random(f"slow/{config.run.seed}/{one.task.task_id}"))
    return msgspec.structs.replace(
        one, task=msgspec.structs.replace(one.task, call_sleep_s=sleep_s)
    )


def _check_machine(task: Task, pool: PoolConfig) -> None:
    """Refuse a task whose machine no host of this configuration has room for; as `_checked`."""
    try:
        offer = backend_class(pool.backend)
        own = resolve_machine_size(pool.needs, offer)
        fit_machine_size(task.machine, own, offer, pool.live_max)
    except NeedsRefused as error:
        raise ConfigError(f"task {task.task_id}: {error}") from error
