"""`penstock mismatch`: trainer against sampler, with every remedy alone and together."""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from penstock.infra.run.config import RunConfig, load_config
from penstock.infra.run.runs import find_run, open_log
from penstock.messages.errors import ConfigError, NotFoundError
from penstock.messages.rollout import RolloutFinished

if TYPE_CHECKING:
    from penstock.actors.policy.model import Policy

_NUM_PROMPTS = 64
_PROMPT_TOKENS = 120
_SHARPNESS = 3.0
"""Fresh weights are near uniform: this makes routers and heads decide, as trained ones do."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What mismatch is measured on."""

    source: str
    old: "Policy"
    """Samples first; swapped out with requests in flight."""
    new: "Policy"
    prompts: Sequence[np.ndarray]
    temperature: float


def mismatch_command(arguments: argparse.Namespace) -> int:
    """Measure and tell; 0 only if exact mode's mismatch is zero.

    With `--json` the last line is the short object, the line before it everything.
    """
    import torch

    from penstock.infra.mismatch.formatting import shortened, told
    from penstock.infra.mismatch.report import report

    if arguments.tokens < 1:
        raise ConfigError(f"--tokens: expected 1 or more, got {arguments.tokens}")
    torch.set_num_threads(1)
    subject = asyncio.run(_subject(arguments))
    figures = report(subject, arguments.tokens)
    if arguments.format_tokens:
        figures["formats"] = asyncio.run(_formats(arguments, subject))
    if arguments.json:
        for each in (figures, shortened(figures)):
            sys.stdout.write(msgspec.json.encode(each).decode() + "\n")
    else:
        sys.stdout.write(told(figures) + "\n")
    return 0 if figures["exact"]["logprob_abs_diff_max"] == 0.0 else 1


async def _subject(arguments: argparse.Namespace) -> Subject:
    if arguments.config:
        return _of_config(arguments.config)
    return await _of_run(arguments)


def _of_config(path: Path) -> Subject:
    """Take fresh, sharpened weights and random prompts."""
    from penstock.actors.policy.model import Policy

    config = load_config(path)
    seed = config.run.seed
    old, new = (_published(Policy(config.policy, seed=seed + k), _SHARPNESS) for k in range(2))
    rng = np.random.default_rng(seed)
    prompts = [
        rng.integers(0, config.policy.vocab_size, _PROMPT_TOKENS - index % 40)
        for index in range(_NUM_PROMPTS)
    ]
    return Subject(
        source=str(path),
        old=old,
        new=new,
        prompts=prompts,
        temperature=config.trainer.loss.temperature,
    )


async def _of_run(arguments: argparse.Namespace) -> Subject:
    """Take a run's first and newest checkpoint, and the prompts of its rollouts."""
    from penstock.actors.trainer.checkpoint import first_checkpoint, newest_checkpoint

    run = find_run(arguments.run, arguments.runs_dir)
    config = load_config(run.config)
    keys = [await first_checkpoint(run.store()), await newest_checkpoint(run.store())]
    if None in keys:
        raise NotFoundError(f"run {run.run_id}: it has no checkpoint yet")
    old, new = [await _of_checkpoint(run.store(), key, config) for key in keys if key]
    async with open_log(run, "mismatch") as bus:
        prompts = await _prompts(bus)
    if not prompts:
        raise NotFoundError(f"run {run.run_id}: its log has no rollout yet")
    temperature = config.trainer.loss.temperature
    return Subject(source=run.run_id, old=old, new=new, prompts=prompts, temperature=temperature)


async def _formats(arguments: argparse.Namespace, subject: Subject) -> list[dict[str, Any]]:
    """Compare the experts' formats on a run's corpus; each is told when it is done.

    Raises:
        ConfigError: There is no run.

    """
    from penstock.actors.trainer.midtraining.corpus import decode_corpus
    from penstock.infra.mismatch.formats import compare_formats
    from penstock.infra.mismatch.formatting import format_line

    if arguments.config:
        raise ConfigError("--format-tokens: expected a run, whose corpus it takes, not --config")
    run = find_run(arguments.run, arguments.runs_dir)
    config = load_config(run.config)
    midtrain, store = config.trainer.midtrain, run.store()
    rows: list[dict[str, Any]] = []
    for row in compare_formats(
        config.policy,
        midtrain,
        decode_corpus(await store.get(midtrain.tokens_key)),
        decode_corpus(await store.get(midtrain.heldout_key)),
        num_tokens=arguments.format_tokens,
        prompts=subject.prompts,
    ):
        sys.stderr.write(format_line(row) + "\n")
        rows.append(row)
    return rows


async def _of_checkpoint(store: Any, key: str, config: RunConfig) -> "Policy":
    from penstock.actors.trainer.checkpoint import load_checkpoint
    from penstock.actors.trainer.learner import Learner

    learner = Learner(config.policy, config.trainer.optimizer, seed=0)
    await load_checkpoint(store, key, learner)
    return _published(learner.policy, 1.0)


def _published(policy: "Policy", sharpness: float) -> "Policy":
    """Round to what generators are given."""
    import torch

    from penstock.actors.policy.checkpoint import load_published, publishable_state

    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() > 1:
                parameter.mul_(sharpness)
    load_published(policy, publishable_state(policy))
    return policy


async def _prompts(bus: Any) -> list[np.ndarray]:
    """Return the contexts that the run's first rollouts were sampled from, turn by turn."""
    from penstock.kernels.arrays import from_array

    prompts: list[np.ndarray] = []
    async for delivery in bus.follow((RolloutFinished,), stop_at_end=True):
        event = delivery.event
        if not isinstance(event, RolloutFinished) or not event.turns:
            continue
        context = np.zeros(0, np.int32)
        for turn in event.turns:
            context = np.concatenate([context, from_array(turn.context_ids)])
            prompts.append(context)
            context = np.concatenate([context, from_array(turn.token_ids)])
        if len(prompts) >= _NUM_PROMPTS:
            break
    return prompts[:_NUM_PROMPTS]
