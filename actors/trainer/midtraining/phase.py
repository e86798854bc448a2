"""Runs mid-training with saves and progress events, and caches its result.

A later run with the same inputs takes the result from the user's cache and begins with RL. An entry
is the last save (`saves.py`). Its key digests everything that the bits depend on: corpora, seed,
settings, initial weights, code, PyTorch, CPU and GPU.
"""

import logging

import msgspec
import torch
import xxhash
from msgspec.structs import replace

from penstock.actors.runtime.context import Context
from penstock.actors.runtime.products import ProductCache, source_digest
from penstock.actors.trainer.config import MidtrainConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.corpus import MidtrainCorpora, decode_corpus
from penstock.actors.trainer.midtraining.midtrain import Midtrainer, MidtrainReport
from penstock.actors.trainer.midtraining.saves import (
    SaveHead,
    encode_save,
    newest_save,
    purpose_of,
    read_head,
    resume,
    store_save,
)
from penstock.kernels.native import processor
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import MidtrainCompleted

log = logging.getLogger(__name__)

FOLDER = "midtrain"
_CODE = ("actors/policy", "actors/trainer", "kernels")


class FinishedCache:
    """The entry of one mid-training.

    There is none where settings say so, where a clock is the budget, and of ranks, each of which
    holds some rows alone.

    Args:
        settings: Of the trainer.
        purpose: As `saves.purpose_of` returns it.
        start_digest: Of the weights that it starts from.
        is_ranked: Whether ranks hold them.

    """

    def __init__(
        self, settings: TrainerConfig, purpose: str, start_digest: str, *, is_ranked: bool
    ) -> None:
        config = settings.midtrain
        self._is_used = config.uses_cache and config.seconds == 0 and not is_ranked
        self._cache = ProductCache(FOLDER)
        machine = [str(torch.__version__), "cpu", settings.num_threads]
        facts = msgspec.json.encode([purpose, start_digest, source_digest(*_CODE), machine])
        self._key = xxhash.xxh3_128_hexdigest(facts + processor())

    def get(self) -> tuple[SaveHead, bytes] | None:
        """Return the last save of an earlier run, or None."""
        data = self._cache.get(self._key) if self._is_used else None
        return None if data is None else (read_head(data, self._key), data)

    def put(self, trainer: Midtrainer, head: SaveHead) -> None:
        """Store a finished mid-training."""
        if self._is_used:
            self._cache.put(self._key, encode_save(trainer, head)[1])


async def run_midtraining(
    ctx: Context, learner: Learner, config: TrainerConfig, seed: int
) -> MidtrainCompleted:
    """Mid-train the learner's policy, if there is a budget, and return the final event.

    Raises:
        NotFoundError: The store has no token arrays under the configured keys.
        CorruptDataError: The arrays are damaged.

    """
    learner.set_threads(config.num_threads)
    report, is_cached = MidtrainReport(), False
    if config.midtrain.num_tokens > 0 or config.midtrain.seconds > 0:
        report, is_cached = await _run(ctx, learner, config, seed)
    return MidtrainCompleted(
        num_tokens=report.num_tokens,
        loss_first=report.loss_first,
        loss_last=report.loss_last,
        heldout_loss=report.heldout_loss,
        heldout_perplexity=report.heldout_perplexity,
        weights_digest=await ctx.offload(learner.weights_digest),
        wall_s=report.wall_s,
        num_saves=report.num_saves,
        num_resumed=report.num_resumed,
        is_cached=is_cached,
    )


async def _run(
    ctx: Context, learner: Learner, settings: TrainerConfig, seed: int
) -> tuple[MidtrainReport, bool]:
    """Return the report, and whether it comes from the cache."""
    config = settings.midtrain
    stored = await ctx.store.get(config.tokens_key), await ctx.store.get(config.heldout_key)
    corpora = MidtrainCorpora(*map(decode_corpus, stored))
    threads = settings.num_threads
    learner.policy.checkpoints_activations = settings.activation_checkpointing
    trainer = Midtrainer(learner, config, corpora, seed, threads)
    purpose = purpose_of(config, learner.policy.config, seed, stored)
    head = SaveHead(purpose=purpose, num_tokens=0, elapsed_s=0.0, num_saves=0, num_resumed=0)
    began = ctx.monotonic()
    # Also of what does not train: the base of adapters.
    start = await ctx.offload(learner.digest, dict(learner.policy.named_parameters()))
    finished = FinishedCache(settings, purpose, start, is_ranked=learner.is_ranked)
    if cached := await ctx.offload(finished.get):
        await ctx.offload(resume, trainer, *cached)
        log.info("mid-training: %d steps from the cache", trainer.num_steps)
        return await ctx.offload(trainer.report, ctx.monotonic() - began), True
    # Ranks take no saves: what each holds of a tensor is no file by itself.
    if not learner.is_ranked and (saved := await newest_save(ctx.store, purpose)):
        await ctx.offload(resume, trainer, *saved)
        head = replace(saved[0], num_resumed=saved[0].num_resumed + 1)
    # Time before a restart counts, or a budget in seconds would never be spent.
    started = ctx.monotonic() - head.elapsed_s
    saved_at = ctx.monotonic()
    elapsed_s = head.elapsed_s
    while trainer.spent(elapsed_s) < 1.0:
        await ctx.offload(trainer.run, elapsed_s)
        # One clock: all ranks take the same steps.
        elapsed_s = (await ctx.offload(learner.gather, ctx.monotonic() - started))[0]
        if not learner.is_ranked and ctx.monotonic() - saved_at >= config.save_s:
            head = replace(
                head,
                num_tokens=trainer.num_tokens,
                elapsed_s=elapsed_s,
                num_saves=head.num_saves + 1,
            )
            await store_save(ctx.store, *await ctx.offload(encode_save, trainer, head))
            saved_at = ctx.monotonic()
        if not learner.rank:
            await ctx.publish(_progress(config, trainer, 0.0, elapsed_s, head))
    report = await ctx.offload(trainer.report, ctx.monotonic() - started)
    if not learner.rank:
        await ctx.publish(_progress(config, trainer, report.heldout_loss, report.wall_s, head))
    head = replace(head, num_tokens=trainer.num_tokens, elapsed_s=report.wall_s)
    await ctx.offload(finished.put, trainer, head)
    return replace(report, num_saves=head.num_saves, num_resumed=head.num_resumed), False


def _progress(
    config: MidtrainConfig,
    trainer: Midtrainer,
    heldout_loss: float,
    elapsed_s: float,
    saved: SaveHead,
) -> MidtrainProgressed:
    recent = trainer.losses[-config.report_steps :]
    return MidtrainProgressed(
        num_tokens=trainer.num_tokens,
        num_tokens_total=config.num_tokens,
        loss=sum(recent) / max(len(recent), 1),
        heldout_loss=heldout_loss,
        tokens_per_s=trainer.num_tokens / elapsed_s if elapsed_s > 0 else 0.0,
        num_saves=saved.num_saves,
        num_tokens_saved=saved.num_tokens,
    )
