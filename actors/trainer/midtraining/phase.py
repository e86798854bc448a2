"""Runs mid-training under the actor's clock, with progress on the log."""

from penstock.actors.runtime.context import Context
from penstock.actors.trainer.config import MidtrainConfig, TrainerConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.corpus import decode_corpus
from penstock.actors.trainer.midtraining.midtrain import Midtrainer, MidtrainReport
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
    report = MidtrainReport()
    if config.midtrain.num_tokens > 0 or config.midtrain.seconds > 0:
        report = await _run(ctx, learner, config, seed)
    return MidtrainCompleted(
        num_tokens=report.num_tokens,
        loss_first=report.loss_first,
        loss_last=report.loss_last,
        heldout_loss=report.heldout_loss,
        heldout_perplexity=report.heldout_perplexity,
        weights_digest=learner.weights_digest(),
        wall_s=report.wall_s,
    )


async def _run(
    ctx: Context, learner: Learner, settings: TrainerConfig, seed: int
) -> MidtrainReport:
    config = settings.midtrain
    train = decode_corpus(await ctx.store.get(config.tokens_key))
    heldout = decode_corpus(await ctx.store.get(config.heldout_key))
    threads = settings.num_threads
    trainer = Midtrainer(learner.policy, config, train, heldout, seed, threads)
    started = ctx.monotonic()
    while trainer.spent(ctx.monotonic() - started) < 1.0:
        await ctx.offload(trainer.run, ctx.monotonic() - started)
        await ctx.publish(_progress(config, trainer, 0.0, ctx.monotonic() - started))
    report = await ctx.offload(trainer.report, ctx.monotonic() - started)
    await ctx.publish(_progress(config, trainer, report.heldout_loss, report.wall_s))
    return report


def _progress(
    config: MidtrainConfig, trainer: Midtrainer, heldout_loss: float, elapsed_s: float
) -> MidtrainProgressed:
    recent = trainer.losses[-config.report_steps :]
    return MidtrainProgressed(
        num_tokens=trainer.num_tokens,
        num_tokens_total=config.num_tokens,
        loss=sum(recent) / max(len(recent), 1),
        heldout_loss=heldout_loss,
        tokens_per_s=trainer.num_tokens / elapsed_s if elapsed_s > 0 else 0.0,
    )
