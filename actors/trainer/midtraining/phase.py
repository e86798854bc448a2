"""Runs mid-training under the actor's clock, with saves, and progress on the log."""

from msgspec.structs import replace

from penstock.actors.runtime.context import Context
from penstock.actors.trainer.config import MidtrainConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.actors.trainer.midtraining.finished import FinishedCache
from penstock.actors.trainer.midtraining.midtrain import Midtrainer, MidtrainReport
from penstock.actors.trainer.midtraining.saves import (
    SaveHead,
    encode_save,
    newest_save,
    purpose_of,
    store_save,
    take_up,
)
from penstock.messages.telemetry import MidtrainProgressed
from penstock.messages.training import MidtrainCompleted


async def run_midtraining(
    ctx: Context, learner: Learner, config: TrainerConfig, seed: int
) -> MidtrainCompleted:
    """Mid-train the learner's policy, if there is a budget; return the event that ends it.

    Raises:
        NotFoundError: The store holds no token arrays under the configured keys.
        CorruptDataError: They are not as `corpus` says.

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
        weights_digest=learner.weights_digest(),
        wall_s=report.wall_s,
        num_saves=report.num_saves,
        num_resumed=report.num_resumed,
        is_cached=is_cached,
    )


async def _run(
    ctx: Context, learner: Learner, settings: TrainerConfig, seed: int
) -> tuple[MidtrainReport, bool]:
    """Return its figures, and whether its steps were taken by an earlier run."""
    config = settings.midtrain
    corpora = await ctx.store.get(config.tokens_key), await ctx.store.get(config.heldout_key)
    train, heldout = map(decode_corpus, corpora)
    threads = settings.num_threads
    learner.policy.checkpoints_activations = settings.activation_checkpointing
    trainer = Midtrainer(learner.policy, config, train, heldout, seed, threads)
    purpose = purpose_of(config, learner.policy.config, seed, corpora)
    head = SaveHead(purpose=purpose, num_tokens=0, elapsed_s=0.0, num_saves=0, num_resumed=0)
    began = ctx.monotonic()
    finished = FinishedCache(settings, purpose, learner.weights_digest())
    if cached := await ctx.offload(finished.get):
        await ctx.offload(take_up, trainer, *cached)
        return await ctx.offload(trainer.report, ctx.monotonic() - began), True
    if saved := await newest_save(ctx.store, purpose):
        await ctx.offload(take_up, trainer, *saved)
        head = replace(saved[0], num_resumed=saved[0].num_resumed + 1)
    started = ctx.monotonic() - head.elapsed_s
    saved_at = ctx.monotonic()
    while trainer.spent(ctx.monotonic() - started) < 1.0:
        await ctx.offload(trainer.run, ctx.monotonic() - started)
        elapsed_s = ctx.monotonic() - started
        if ctx.monotonic() - saved_at >= config.save_s:
            head = replace(
                head,
                num_tokens=trainer.num_tokens,
                elapsed_s=elapsed_s,
                num_saves=head.num_saves + 1,
            )
            await store_save(ctx.store, *await ctx.offload(encode_save, trainer, head))
            saved_at = ctx.monotonic()
        await ctx.publish(_progress(config, trainer, 0.0, elapsed_s, head))
    report = await ctx.offload(trainer.report, ctx.monotonic() - started)
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
