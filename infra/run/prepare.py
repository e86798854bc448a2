"""Builds the inputs of a run from its configuration and seed, and puts them into its object store.

The inputs are the tasks and hidden tests of both splits (`envs/tasks/storage.py`), and either the
tokenizer and mid-training corpora or a checkpoint with user-supplied corpora
(`infra/models/claim.py`, `infra/corpora/own.py`). The same settings and seed give the same bytes.
Importing this module does not import torch.
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
from penstock.actors.policy.tokenizer import TOKENIZER_KEY, Tokenizer
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
from penstock.infra.config.prepare import CorporaConfig
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
from penstock.infra.run.task_sources import drawn_tasks
from penstock.messages.bus import ObjectStore
from penstock.messages.errors import ConfigError
from penstock.messages.reading.parsing import parse_msgpack
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
    """Build and store all inputs of a run unless they are stored already.

    Cancellation during the build stops it soon and leaves nothing in the store.

    Args:
        note_cached: Callback for the names of inputs that came from the user's cache.

    Raises:
        ConfigError: A file that `[model]` names is missing or broken, or a task does not fit the
            engine's context.

    """
    if all([await store.exists(key) for key in _object_keys(config)]):
        log.info("inputs of the run are in its store already")
        return
    section = config.model
    # Building takes seconds to minutes of CPU time: in a thread, the event loop stays responsive.
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
        # A thread cannot be cancelled; it checks this flag before each task and each text.
        stopped.set()
    # Everything is built before the first put, so that a refused configuration stores nothing.
    for key, data in objects.items():
        await store.put(key, data)
    log.info("stored %d inputs of the run", len(objects))
    if section.checkpoint:
        await claim_model(section, config.policy, store)


def build(
    config: RunConfig, stopped: threading.Event, note_cached: Callable[[str], None] = log.info
) -> dict[str, bytes]:
    """Build every input of a run that starts from random weights; return objects by key.

    Raises:
        ConfigError: A task does not fit the engine's context, or the function that
            `prepare.corpora.make` names is missing or returns no corpora.
        PreparationStoppedError: `stopped` was set during the build.

    """
    objects = _task_sets(config, stopped)
    section = config.prepare.corpora
    if section is None:
        text = "expected a function that makes the tokenizer and the mid-training corpora"
        raise ConfigError(f"prepare.corpora: {text}, or model.checkpoint")
    make = cast(
        "Callable[[CorpusRequest], object]", load_reference(section.make, "prepare.corpora.make")
    )
    request = corpus_request(config, section, stopped)
    longest = config.trainer.midtrain.sequence_tokens

    def made() -> dict[str, bytes]:
        return _midtrain_objects(make(request), request, section.make, longest)

    # User-supplied corpora bypass the cache: its key does not cover the content of their files.
    if request.corpora or not config.trainer.midtrain.uses_cache:
        return _fitting(objects | made(), config)
    facts = (
        *(request.seed, request.vocab_size, request.harness, request.limits, request.summary),
        *(request.given, request.sources, longest),
    )
    found, is_kept = kept_corpora(facts, section.make, made)
    if is_kept:
        note_cached("tokenizer and corpora of mid-training")
    return _fitting(objects | found, config)


def _fitting(objects: dict[str, bytes], config: RunConfig) -> dict[str, bytes]:
    """Return a run's objects after checking that every prompt fits, by their own tokenizer.

    Raises:
        ConfigError: One does not; the text names the task and both token counts.

    """
    chat = PenstockChat(Tokenizer.from_json(objects[TOKENIZER_KEY].decode(), TOKENIZER_KEY))
    for split in Split:
        for task in parse_msgpack(objects[tasks_key(split)], list[Task], "tasks"):
            _check_prompt(task, config, chat)
    return objects


def corpus_request(
    config: RunConfig, section: CorporaConfig, stopped: threading.Event
) -> CorpusRequest:
    """Return the request that is passed to the function of `prepare.corpora.make`."""
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
    """Return the tokenizer and both corpora by key; `model.corpora` follow the made documents."""
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
    """Build the tasks and corpora of a run that starts from a checkpoint; return objects by key.

    Raises:
        ConfigError: A text or trace is malformed, or a task does not fit the context.
        PreparationStoppedError: `stopped` was set during the build.

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
    """Refuse an evaluation set that selects no held-out task.

    Raises:
        ConfigError: A set is empty; the text names it and the sources and categories that exist.

    """
    for each in config.evaluator.sets:
        if not eligible_tasks(heldout, each.sources, each.categories):
            sources = sorted({task.source for task in heldout})
            categories = sorted({task.category for task in heldout})
            text = f"there are tasks of the sources {sources} and the categories {categories}"
            asked = f"{each.sources or 'all'} and {each.categories or 'all'}"
            raise ConfigError(f"evaluator.sets.{each.name}: expected some of {text}, got {asked}")


def _checked(one: TaskCandidate, config: RunConfig, chat: ChatFormat | None) -> TaskCandidate:
    """Return a task after checking that its longest episode and its prompt fit the context.

    Raises:
        ConfigError: One does not fit; the text names the task and both token counts.

    """
    task, limits = one.task, one.task.limits
    _check_machine(task, config.sandbox_host.pool)
    check_window(limits, config, f"task {task.task_id}: limits")
    if chat is not None:
        _check_prompt(task, config, chat)
    return one


def _check_prompt(task: Task, config: RunConfig, chat: ChatFormat) -> None:
    opening = Conversation(
        chat, task, offered_tools(config.pacer.harness), ends_on_parse_error=True
    )
    longest = task.limits.window_tokens_max or task.limits.num_tokens_max
    if opening.end is not None:
        raise ConfigError(
            f"task {task.task_id}: its prompt has {len(opening.token_ids)} tokens with the "
            f"tools, and its longest context is {longest}"
        )


def _slowed(one: TaskCandidate, config: RunConfig) -> TaskCandidate:
    """Return a task with a drawn delay per call where `prepare.slow_calls` asks for it."""
    slow = config.prepare.slow_calls
    if slow is None:
        return one
    # Seeded per task: the delay does not depend on the order or number of tasks.
    sleep_s = slow.draw(random.Random(f"slow/{config.run.seed}/{one.task.task_id}"))
    return msgspec.structs.replace(
        one, task=msgspec.structs.replace(one.task, call_sleep_s=sleep_s)
    )


def _check_machine(task: Task, pool: PoolConfig) -> None:
    """Refuse a task whose machine does not fit any host of this configuration.

    Raises:
        ConfigError: It does not fit; the text names the task.

    """
    try:
        offer = backend_class(pool.backend)
        own = resolve_machine_size(pool.needs, offer)
        fit_machine_size(task.machine, own, offer, pool.live_max)
    except NeedsRefused as error:
        raise ConfigError(f"task {task.task_id}: {error}") from error
