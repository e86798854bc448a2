"""The phase before RL: DPO and KTO on the pairs and labels of the run's store.

It starts from the weights of mid-training, which are its reference, and ends in version 0. It saves
nothing before its end: a trainer that restarts repeats it, to the same bits.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch

from penstock.actors.runtime.context import Context
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner, published
from penstock.actors.trainer.preferences.examples import (
    PREFERENCES_HELDOUT_KEY,
    PREFERENCES_KEY,
    PreferenceExample,
    decode_examples,
)
from penstock.actors.trainer.preferences.objective import (
    PreferenceSums,
    accumulate_preferences,
    evaluate_preferences,
    with_reference,
)
from penstock.messages.signals.preferences import PreferencesProgressed, PreferencesTrained

log = logging.getLogger(__name__)

DECAYED_RATE = 0.1


async def run_preferences(
    ctx: Context, learner: Learner, config: TrainerConfig, seed: int
) -> PreferencesTrained | None:
    """Train the learner's policy on the store's examples; return None if there are none.

    Raises:
        CorruptDataError: The examples are damaged.
        RuntimeError: A gradient is not finite.

    """
    if not await ctx.store.exists(PREFERENCES_KEY):
        return None
    train, heldout = await _examples(ctx, learner), await _examples(ctx, learner, is_heldout=True)
    started = ctx.monotonic()
    learner.set_threads(config.num_threads)
    phase = await ctx.offload(PreferenceTrainer, learner, config, train, heldout, seed)
    before = await ctx.offload(phase.measure)
    log.info("preferences: %d examples, %d steps", len(train), phase.num_steps)
    while phase.num_done < phase.num_steps:
        await ctx.offload(phase.run)
        if not learner.rank:
            await ctx.publish(phase.progress())
    after = await ctx.offload(phase.measure)
    tenth = max(1, len(phase.losses) // 10)
    found = PreferencesTrained(
        num_pairs=sum(each.is_pair for each in (*train, *heldout)),
        num_labels=sum(not each.is_pair for each in (*train, *heldout)),
        num_heldout=len(heldout),
        num_steps=phase.num_steps,
        loss_first=sum(phase.losses[:tenth]) / tenth,
        loss_last=sum(phase.losses[-tenth:]) / tenth,
        heldout_before=before,
        heldout_after=after,
        weights_digest=await ctx.offload(learner.weights_digest),
        wall_s=ctx.monotonic() - started,
    )
    if not learner.rank:
        await ctx.publish(found)
    return found


async def _examples(
    ctx: Context, learner: Learner, *, is_heldout: bool = False
) -> list[PreferenceExample]:
    data = await ctx.store.get(PREFERENCES_HELDOUT_KEY if is_heldout else PREFERENCES_KEY)
    policy = learner.policy.config
    return decode_examples(data, policy.vocab_size, policy.max_position_embeddings)


class PreferenceTrainer:
    """Runs a few steps per call, so that its caller can report progress in between."""

    def __init__(
        self,
        learner: Learner,
        config: TrainerConfig,
        train: Sequence[PreferenceExample],
        heldout: Sequence[PreferenceExample],
        seed: int,
    ) -> None:
        self._learner, self._config = learner, config
        # A copy: the learner's own weights move with every step.
        self._reference = published(learner.parameters)
        self._heldout = self._referred(heldout)
        settings = config.preferences
        self._batches = batches(train, settings.num_epochs, settings.batch_examples, seed)
        self.num_steps = settings.num_epochs * math.ceil(len(train) / settings.batch_examples)
        self.num_done = 0
        self.losses: list[float] = []
        self._last = PreferenceSums()
        self._optimizer = torch.optim.AdamW(
            learner.parameters.values(),
            lr=settings.learning_rate,
            # As in mid-training, but without weight decay.
            betas=(0.9, 0.95),
            weight_decay=0.0,
        )

    def run(self) -> None:
        """Run the steps of one report."""
        for batch in islice(self._batches, self._config.preferences.report_steps):
            self._step(batch)

    def measure(self) -> dict[str, float]:
        """Return the metrics of the held-out examples."""
        if not self._heldout:
            return {}
        with self._learner.published_weights():
            sums = evaluate_preferences(self._learner, self._heldout, self._config)
        return sums.figures() | {"loss": sums.loss}

    def progress(self) -> PreferencesProgressed:
        """Return the progress so far."""
        return PreferencesProgressed(
            num_steps=self.num_done,
            num_steps_total=self.num_steps,
            loss=self.losses[-1],
            figures=self._last.figures(),
        )

    def _step(self, batch: Sequence[PreferenceExample]) -> None:
        settings = self._config.preferences
        self.num_done += 1
        for group in self._optimizer.param_groups:
            group["lr"] = settings.learning_rate * self._rate()
        referred = self._referred(batch)
        with self._learner.published_weights():
            self._last = accumulate_preferences(self._learner, referred, self._config, 1.0)
        self.losses.append(self._last.loss)
        self._learner.clip(settings.grad_clip)
        self._optimizer.step()
        self._learner.clear()

    def _rate(self) -> float:
        share = self.num_done / self.num_steps
        warmup = self._config.preferences.warmup_fraction
        if share < warmup:
            return share / warmup
        return 1.0 - (1.0 - DECAYED_RATE) * (share - warmup) / max(1.0 - warmup, 1e-9)

    def _referred(self, examples: Sequence[PreferenceExample]) -> list[PreferenceExample]:
        return with_reference(self._learner, self._reference, examples, self._config)


def batches(
    examples: Sequence[PreferenceExample], num_epochs: int, num_examples: int, seed: int
) -> Iterator[list[PreferenceExample]]:
    """Yield the batches of all epochs, reshuffled in each epoch."""
    random = np.random.default_rng(seed)
    for _ in range(num_epochs):
        order = random.permutation(len(examples)).tolist()
        for start in range(0, len(order), num_examples):
            yield [examples[index] for index in order[start : start + num_examples]]
