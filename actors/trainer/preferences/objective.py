"""DPO and KTO: losses, forward passes over replies, and the gradient of a batch.

The policy's own router chooses the experts, even if a sampler's choice is on record: the other
reply of a pair has no record, and both have to be measured the same way. A context that replies
share is computed once (`actors/policy/packing.py`).

With log-ratio h(y) = log pi(y | x) - log pi_reference(y | x), summed over the reply's tokens:

    DPO (arXiv 2305.18290, equation 7):  -log sigmoid(beta (h(chosen) - h(rejected)))
    KTO (arXiv 2402.01306, section 4.1): w (1 - sigmoid(beta (h(y) - z)))  of a desirable reply
                                         w (1 - sigmoid(beta (z - h(y))))  of an undesirable one

z estimates KL(pi || reference) from replies that do not belong to their contexts, without a
gradient. Shapes: N examples.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch.nn import functional as F

from penstock.actors.policy.model import Policy
from penstock.actors.policy.packing import pack_tree
from penstock.actors.trainer.config import TrainerConfig
from penstock.actors.trainer.learner import Learner, NonFiniteError, Pass, Weights
from penstock.actors.trainer.objective.token_scores import token_scores
from penstock.actors.trainer.preferences.config import PreferencesConfig
from penstock.actors.trainer.preferences.examples import (
    PreferenceExample,
    PreferenceReply,
    unrelated_replies,
)


def dpo_losses(
    chosen: torch.Tensor, rejected: torch.Tensor, config: PreferencesConfig
) -> torch.Tensor:
    """Return the loss of each pair, [N], from the log-ratios [N] of both replies.

    With `label_smoothing` this is conservative DPO.
    """
    margin, share = config.beta * (chosen - rejected), config.label_smoothing
    return -(1 - share) * F.logsigmoid(margin) - share * F.logsigmoid(-margin)


def kto_kl(log_ratios: torch.Tensor) -> torch.Tensor:
    """Return z, 0-dim and >= 0, from the log-ratios [N] of unrelated replies; 0 for N = 0."""
    if not log_ratios.numel():
        return log_ratios.new_zeros(())
    return log_ratios.detach().mean().clamp(min=0)


def kto_losses(
    log_ratios: torch.Tensor,
    is_desirable: torch.Tensor,
    kl: torch.Tensor,
    config: PreferencesConfig,
) -> torch.Tensor:
    """Return the loss of each label, [N], from log-ratios [N], bool [N] and z of the batch."""
    above = torch.where(is_desirable, log_ratios - kl, kl - log_ratios)
    share = is_desirable.to(log_ratios.dtype)
    weight = config.desirable_weight * share + config.undesirable_weight * (1 - share)
    return weight * (1 - torch.sigmoid(config.beta * above))


T = TypeVar("T")


@dataclass(kw_only=True)
class PreferenceSums:
    """Sums over the pairs and labels of a batch; sums of passes can be added."""

    num_pairs: float = 0.0
    num_labels: float = 0.0
    dpo_loss: float = 0.0
    num_right: float = 0.0
    """Pairs whose chosen reply has the larger log-ratio."""
    margin: float = 0.0
    """beta times the difference of the log-ratios."""
    kto_loss: float = 0.0
    kto_kl: float = 0.0
    """z of the batch, not a sum."""

    def add(self, other: "PreferenceSums") -> None:
        """Add the sums of another pass."""
        for field in fields(self):
            # `kto_kl` is 0 in passes, so that it is counted once.
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def loss(self) -> float:
        """Mean over pairs and labels."""
        return (self.dpo_loss + self.kto_loss) / max(self.num_pairs + self.num_labels, 1.0)

    def figures(self) -> dict[str, float]:
        """Return the metrics of a step; empty without examples."""
        found: dict[str, float] = {}
        if self.num_pairs:
            found |= {
                "num_pairs": self.num_pairs,
                "dpo_loss": self.dpo_loss / self.num_pairs,
                "dpo_accuracy": self.num_right / self.num_pairs,
                "dpo_margin": self.margin / self.num_pairs,
            }
        if self.num_labels:
            found |= {
                "num_labels": self.num_labels,
                "kto_loss": self.kto_loss / self.num_labels,
                "kto_kl": self.kto_kl,
            }
        return found


def reply_logprobs(policy: Policy, replies: Sequence[PreferenceReply]) -> torch.Tensor:
    """Return the summed log-probability of each reply's targets, [S] float32."""
    token_ids = [np.concatenate([each.context_ids, each.reply_ids]) for each in replies]
    # Without recorded experts: zero slots let the router choose.
    free = [np.zeros((ids.size - 1, 1, 0), np.int64) for ids in token_ids]
    tree = pack_tree([ids[:-1] for ids in token_ids], free)
    output = policy(_placed(policy, tree.input_ids), tree.lengths, None, tree.parents)
    at = [each.context_ids.size + np.flatnonzero(each.is_target) for each in replies]
    # Position t predicts token t + 1.
    rows = np.concatenate([places[here - 1] for places, here in zip(tree.places, at, strict=True)])
    targets = np.concatenate([ids[here] for ids, here in zip(token_ids, at, strict=True)])
    hidden = output.hidden.index_select(0, _placed(policy, rows))
    logprobs = token_scores(policy, hidden, _placed(policy, targets)).logprobs.cpu()
    sequence = torch.arange(len(replies)).repeat_interleave(torch.tensor([len(h) for h in at]))
    return logprobs.new_zeros(len(replies)).index_add(0, sequence, logprobs)


def _placed(policy: Policy, values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).to(policy.device)


def with_reference(
    learner: Learner,
    weights: Weights,
    examples: Sequence[PreferenceExample],
    config: TrainerConfig,
) -> list[PreferenceExample]:
    """Return a batch's examples with the log-probabilities of a reference policy."""
    replies = [reply for example in examples for reply in example.replies]
    with learner.computing_with(weights):
        unrelated = iter(_unrelated(learner, examples, config).tolist())
        own = iter(_all_logprobs(learner, replies, config).tolist())
    # A single label has no unrelated reply.
    has_kl = sum(not example.is_pair for example in examples) > 1
    return [
        example.with_reference(
            chosen=next(own) if example.chosen is not None else 0.0,
            rejected=next(own) if example.rejected is not None else 0.0,
            unrelated=next(unrelated) if has_kl and not example.is_pair else 0.0,
        )
        for example in examples
    ]


def referred_examples(
    learner: Learner, examples: Sequence[PreferenceExample], config: TrainerConfig
) -> list[PreferenceExample]:
    """Return a step's examples with the log-probabilities of version 0.

    Raises:
        ValueError: The learner does not have version 0.

    """
    if not examples:
        return []
    reference = learner.versions.reference
    if reference is None:
        raise ValueError("trainer.preferences: the weights of version 0 are missing")
    return with_reference(learner, reference, examples, config)


def take_preference_pass(
    learner: Learner, examples: Sequence[PreferenceExample], config: TrainerConfig
) -> PreferenceSums:
    """Add the gradient of a step's examples to the learner's; raises what `take_pass` raises."""
    # A time-triggered version may hold few samples; its step is scaled accordingly.
    num_of_epoch = config.epoch.num_samples if config.epoch else 0
    share = len(examples) / max(len(examples), num_of_epoch)
    with learner.published_weights():
        weight = config.preferences.live_weight * share
        sums = accumulate_preferences(learner, examples, config, weight)
    if not math.isfinite(sums.loss):
        learner.clear()
        raise NonFiniteError(f"the loss of corrections and judgments is {sums.loss}")
    return sums


def accumulate_preferences(
    learner: Learner, examples: Sequence[PreferenceExample], config: TrainerConfig, weight: float
) -> PreferenceSums:
    """Add the gradient of `weight` times the batch's mean loss to the learner's parameters.

    Args:
        learner: Learner that computes with its published weights.
        examples: Examples with the reference's log-probabilities.
        weight: Factor of the batch's mean loss.

    """
    kl = _kl(learner, examples, config)
    total = PreferenceSums(kto_kl=float(kl))
    for sums in learner.accumulate(
        _passes(learner.policy, examples, config, kl, weight / len(examples)),
        num_workers=config.num_workers,
        num_threads=config.num_threads,
    ):
        total.add(sums)
    return total


def evaluate_preferences(
    learner: Learner, examples: Sequence[PreferenceExample], config: TrainerConfig
) -> PreferenceSums:
    """Return the sums of one batch of examples, without a gradient."""
    kl = _kl(learner, examples, config)
    total = PreferenceSums(kto_kl=float(kl))
    for _, sums in learner.run_all(
        _passes(learner.policy, examples, config, kl, 1.0),
        num_workers=config.num_workers,
        num_threads=config.num_threads,
    ):
        total.add(sums)
    return total


def _passes(
    policy: Policy,
    examples: Sequence[PreferenceExample],
    config: TrainerConfig,
    kl: torch.Tensor,
    scale: float,
) -> list[Pass[PreferenceSums]]:
    return [
        partial(_pass, policy, part, config.preferences, kl, scale)
        for part in _parts(examples, lambda each: each.num_tokens, config.micro_batch_tokens)
    ]


def _pass(
    policy: Policy,
    examples: Sequence[PreferenceExample],
    config: PreferencesConfig,
    kl: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, PreferenceSums]:
    """Return the scaled sum of the losses of some examples, and their sums."""
    pairs = [each for each in examples if each.is_pair]
    labels = [each for each in examples if not each.is_pair]
    replies = [reply for each in (*pairs, *labels) for reply in each.replies]
    before = [value for each in (*pairs, *labels) for value in each.reference.of(each)]
    # Pairs first, two replies each, then labels: the slices below rely on it.
    ratios = reply_logprobs(policy, replies) - torch.tensor(before)
    chosen, rejected = ratios[: 2 * len(pairs)].unflatten(0, (len(pairs), 2)).unbind(1)
    is_desirable = torch.tensor([each.is_desirable for each in labels], dtype=torch.bool)
    weights = torch.tensor([each.weight for each in labels])
    dpo = dpo_losses(chosen, rejected, config)
    kto = weights * kto_losses(ratios[2 * len(pairs) :], is_desirable, kl, config)
    margin = (chosen - rejected).detach()
    sums = PreferenceSums(
        num_pairs=float(len(pairs)),
        num_labels=float(len(labels)),
        dpo_loss=float(dpo.detach().double().sum()),
        num_right=float((margin > 0).sum()),
        margin=config.beta * float(margin.double().sum()),
        kto_loss=float(kto.detach().double().sum()),
    )
    return (dpo.sum() + kto.sum()) * scale, sums


def _kl(
    learner: Learner, examples: Sequence[PreferenceExample], config: TrainerConfig
) -> torch.Tensor:
    unrelated = _unrelated(learner, examples, config)
    before = [each.reference.unrelated for each in examples if not each.is_pair]
    return kto_kl(unrelated - torch.tensor(before[: len(unrelated)]))


def _unrelated(
    learner: Learner, examples: Sequence[PreferenceExample], config: TrainerConfig
) -> torch.Tensor:
    labels = [example for example in examples if not example.is_pair]
    replies = unrelated_replies(labels, learner.policy.config.max_position_embeddings)
    return _all_logprobs(learner, replies, config)


def _all_logprobs(
    learner: Learner, replies: Sequence[PreferenceReply], config: TrainerConfig
) -> torch.Tensor:
    parts = _parts(replies, lambda reply: reply.num_tokens, config.micro_batch_tokens)
    found = learner.run_all(
        [partial(reply_logprobs, learner.policy, part) for part in parts],
        num_workers=config.num_workers,
        num_threads=config.num_threads,
    )
    return torch.cat(found) if found else torch.zeros(0)


def _parts(
    items: Sequence[T], num_tokens: Callable[[T], int], tokens_max: int
) -> Iterator[list[T]]:
    """Split items into passes of at most `tokens_max` tokens, or of a single longer item."""
    part: list[T] = []
    room = tokens_max
    for item in items:
        # In order and greedily, so that the split is the same in a replay.
        if part and num_tokens(item) > room:
            yield part
            part, room = [], tokens_max
        part.append(item)
        room -= num_tokens(item)
    if part:
        yield part
