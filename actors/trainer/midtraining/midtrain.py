"""Mid-training: next-token and multi-token prediction on packed tokens."""

import heapq
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice

import msgspec
import numpy as np
import torch
from torch.nn import functional as F

from penstock.actors.policy.device import copied_to
from penstock.actors.trainer.config import MidtrainConfig
from penstock.actors.trainer.learner import Learner
from penstock.actors.trainer.midtraining.corpus import Corpus, MidtrainCorpora, segments
from penstock.actors.trainer.objective.token_scores import token_scores
from penstock.messages.errors import CorruptDataError


@dataclass(frozen=True)
class PackedBatch:
    """Packed segments: T tokens, M of them targets, Q targets of the second head."""

    token_ids: torch.Tensor
    lengths: list[int]
    rows: torch.Tensor
    """[M] positions that have a next token in their segment."""
    mtp_rows: torch.Tensor
    """[Q] positions that have a token after next."""
    weights: torch.Tensor
    """[T] weight of each token as a target."""

    def on(self, device: torch.device) -> "PackedBatch":
        """Return a copy on a device."""
        tensors = (self.token_ids, self.rows, self.mtp_rows, self.weights)
        token_ids, rows, mtp_rows, weights = (tensor.to(device) for tensor in tensors)
        return PackedBatch(token_ids, self.lengths, rows, mtp_rows, weights)


@dataclass(frozen=True)
class BatchTotals:
    """Divisors of a batch's losses, over all its passes."""

    num_tokens: int
    next_weight: float
    mtp_weight: float

    @staticmethod
    def of(passes: list[PackedBatch]) -> "BatchTotals":
        """Return the totals, with a lower bound so that no batch divides by zero."""
        return BatchTotals(
            sum(batch.token_ids.numel() for batch in passes),
            max(sum(float(batch.weights[batch.rows + 1].sum()) for batch in passes), 1e-6),
            max(sum(float(batch.weights[batch.mtp_rows + 2].sum()) for batch in passes), 1e-6),
        )


def step_batches(
    corpus: Corpus, config: MidtrainConfig, random: np.random.Generator, num_skipped: int = 0
) -> Iterator[list[PackedBatch]]:
    """Yield the passes of one step after another, forever, reshuffled in each epoch.

    Args:
        num_skipped: Number of first steps to skip.

    """
    pieces = segments(corpus, config.sequence_tokens)
    for step in islice(_step_pieces(pieces, config, random), num_skipped, None):
        yield [packed_batch(corpus, part) for part in even_parts(step, config.pass_tokens)]


def _step_pieces(
    pieces: np.ndarray, config: MidtrainConfig, random: np.random.Generator
) -> Iterator[np.ndarray]:
    while True:
        shuffled = pieces[random.permutation(len(pieces))]
        yield from packed_runs(shuffled, config.batch_tokens)


def packed_runs(pieces: np.ndarray, tokens_max: int) -> Iterator[np.ndarray]:
    """Cut [S, 2] pieces into runs of at most `tokens_max` tokens."""
    start, room = 0, tokens_max
    for index, length in enumerate(pieces[:, 1].tolist()):
        if length > room:
            yield pieces[start:index]
            start, room = index, tokens_max
        room -= length
    yield pieces[start:]


def even_parts(pieces: np.ndarray, tokens_max: int) -> list[np.ndarray]:
    """Distribute [S, 2] pieces over few parts of nearly equal size, at most `tokens_max` each.

    Raises:
        ValueError: There is no piece, or one of more than `tokens_max` tokens.

    """
    if not len(pieces):
        raise ValueError("pieces: expected at least one, got none")
    lengths = pieces[:, 1]
    # Greedy: the longest piece first, each to the smallest part. Equal parts, because workers wait
    # for the largest.
    longest_first = np.argsort(-lengths, kind="stable").tolist()
    num_large = int((2 * lengths > tokens_max).sum())  # No two of these fit into one part.
    fewest = max(1, math.ceil(lengths.sum() / tokens_max), num_large)
    # Ends at the latest with one part per piece.
    for num_parts in range(fewest, len(pieces) + 1):
        parts = _distribute(longest_first, lengths, num_parts, tokens_max)
        if parts is not None:
            return [pieces[part] for part in parts]
    raise ValueError(f"pieces: expected at most {tokens_max} tokens in each, got {lengths.max()}")


def _distribute(
    order: list[int], lengths: np.ndarray, num_parts: int, tokens_max: int
) -> list[list[int]] | None:
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    sizes = [(0, part) for part in range(num_parts)]
    for piece in order:
        size, part = sizes[0]
        size += int(lengths[piece])
        if size > tokens_max:
            return None
        parts[part].append(piece)
        heapq.heapreplace(sizes, (size, part))
    return parts


def packed_batch(corpus: Corpus, pieces: np.ndarray) -> PackedBatch:
    """Gather [S, 2] pieces of a corpus into one pass."""
    index = np.concatenate([np.arange(start, start + length) for start, length in pieces.tolist()])
    lengths = pieces[:, 1].tolist()
    to_end = np.concatenate([np.arange(length, 0, -1) for length in lengths])
    weights = np.ones(index.size, np.float32)
    if corpus.weights is not None:
        weights = corpus.weights[index].astype(np.float32)
    return PackedBatch(
        token_ids=torch.from_numpy(corpus.tokens[index].astype(np.int64)),
        lengths=lengths,
        rows=torch.from_numpy(np.flatnonzero(to_end > 1)),
        mtp_rows=torch.from_numpy(np.flatnonzero(to_end > 2)),
        weights=torch.from_numpy(weights),
    )


_WEIGHT, _LOSSES = "weights", "losses"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


class MidtrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """Results of mid-training; losses are in nats per token."""

    num_tokens: int = 0
    loss_first: float = 0.0
    """Mean over the first tenth of the steps."""
    loss_last: float = 0.0
    """Mean over the last tenth of the steps."""
    heldout_loss: float = 0.0
    wall_s: float = 0.0
    num_saves: int = 0
    num_resumed: int = 0

    @property
    def heldout_perplexity(self) -> float:
        """Exp of the held-out loss."""
        return math.exp(self.heldout_loss)


class Midtrainer:
    """Runs a few steps per call, so that its caller can report and stop in between."""

    def __init__(
        self,
        learner: Learner,
        config: MidtrainConfig,
        corpora: MidtrainCorpora,
        seed: int,
        num_threads: int = 1,
    ) -> None:
        """Prepare; several ranks make the same calls in the same order."""
        self._learner, self._config = learner, config
        self._policy = policy = learner.policy
        self._num_threads = num_threads
        self._corpora, self._seed = corpora, seed
        self.step_batches = step_batches(corpora.train, config, np.random.default_rng(seed))
        # Weight decay for matrices only, not for norms.
        decayed = [p for p in learner.trained.values() if p.dim() > 1]
        plain = [p for p in learner.trained.values() if p.dim() <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain}],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            # On a CPU, rows cut over ranks have their bits from one loop over elements alone.
            fused=not learner.is_ranked or policy.device.type == "cuda",
        )
        self.num_tokens = 0
        self.losses: list[float] = []

    @property
    def num_steps(self) -> int:
        """Number of steps taken."""
        return len(self.losses)

    def state(self) -> dict[str, torch.Tensor]:
        """Return weights, moments and losses by name; tensors share memory with the trainer."""
        named = self._learner.trained
        moments = {
            f"{moment}.{name}": value
            for name, parameter in named.items()
            for moment, value in self._optimizer.state.get(parameter, {}).items()
        }
        weights = {f"{_WEIGHT}.{name}": parameter.detach() for name, parameter in named.items()}
        return weights | moments | {_LOSSES: torch.tensor(self.losses, dtype=torch.float64)}

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor], num_tokens: int) -> None:
        """Resume after the steps of a saved state.

        Raises:
            CorruptDataError: The tensors do not fit this policy.

        """
        named = self._learner.trained
        for name, parameter in named.items():
            weight = state.get(f"{_WEIGHT}.{name}")
            if weight is None or weight.shape != parameter.shape:
                raise CorruptDataError(f"save of mid-training: {name} is not this policy's")
            parameter.copy_(weight)
            if f"{_MOMENTS[0]}.{name}" in state:  # Otherwise it never had a gradient.
                self._optimizer.state[parameter] = {
                    moment: copied_to(parameter.device, state[f"{moment}.{name}"])
                    for moment in _MOMENTS
                }
        self.losses, self.num_tokens = state[_LOSSES].tolist(), num_tokens
        # From the seed and the number of steps: the generator's state need not be saved.
        random = np.random.default_rng(self._seed)
        self.step_batches = step_batches(self._corpora.train, self._config, random, self.num_steps)

    def spent(self, elapsed_s: float) -> float:
        """Return the spent share of the budget, 0..1."""
        if self._config.seconds > 0:
            return min(1.0, elapsed_s / self._config.seconds)
        return min(1.0, self.num_tokens / max(self._config.num_tokens, 1))

    def run(self, elapsed_s: float) -> None:
        """Take the steps of one report.

        Args:
            elapsed_s: Seconds since the start, for a budget in seconds.

        """
        for _ in range(self._config.report_steps):
            share = self.spent(elapsed_s)
            if share >= 1.0:
                break
            self.losses.append(self._step(next(self.step_batches), share))

    def heldout_loss(self) -> float:
        """Return the mean next-token loss over the first tokens of the held-out corpus."""
        batches: list[PackedBatch] = []
        weight = 0.0
        pieces = segments(self._corpora.heldout, self._config.sequence_tokens)
        for part in packed_runs(pieces, self._config.pass_tokens):
            batch = packed_batch(self._corpora.heldout, part)
            batches.append(batch)
            weight += float(batch.weights[batch.rows + 1].double().sum())
            if weight >= self._config.heldout_tokens_max:
                break
        losses = self._learner.run_all(
            [partial(self._heldout, batch) for batch in batches],
            num_workers=self._config.num_workers,
            num_threads=self._num_threads,
        )
        return sum(losses) / max(weight, 1.0)

    def _heldout(self, batch: PackedBatch) -> float:
        """Return the weighted sum of a pass's losses."""
        batch = batch.on(self._policy.device)
        losses, weights = self._losses(self._policy(batch.token_ids, batch.lengths).hidden, batch)
        return float((losses * weights).double().sum())

    def report(self, wall_s: float) -> MidtrainReport:
        """Return the results, with the held-out loss measured now."""
        tenth = max(1, len(self.losses) // 10)
        return MidtrainReport(
            num_tokens=self.num_tokens,
            loss_first=sum(self.losses[:tenth]) / tenth,
            loss_last=sum(self.losses[-tenth:]) / tenth,
            heldout_loss=self.heldout_loss(),
            wall_s=wall_s,
        )

    def _step(self, passes: list[PackedBatch], progress: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._config.learning_rate * rate(self._config, progress)
        totals = BatchTotals.of(passes)
        losses = self._learner.accumulate(
            [partial(self._forward, batch, totals) for batch in passes],
            num_workers=self._config.num_workers,
            num_threads=self._num_threads,
        )
        bound = self._config.grad_clip
        if self._learner.is_ranked:
            self._learner.clip(bound)
        else:
            parameters = list(self._learner.trained.values())
            torch.nn.utils.clip_grad_norm_(parameters, bound, error_if_nonfinite=True)
        self._optimizer.step()
        self._learner.clear()
        self._optimizer.zero_grad(set_to_none=True)
        self.num_tokens += totals.num_tokens
        return sum(losses)

    def _forward(self, batch: PackedBatch, totals: BatchTotals) -> tuple[torch.Tensor, float]:
        batch = batch.on(self._policy.device)
        output = self._policy(batch.token_ids, batch.lengths)
        losses, weights = self._losses(output.hidden, batch)
        loss = (losses * weights).sum() / totals.next_weight
        share = batch.token_ids.numel() / totals.num_tokens
        total = loss + self._config.balance_weight * share * output.balance_loss
        if self._policy.config.mtp_num_heads and self._config.mtp_weight > 0:
            mtp_sum = self._mtp_loss_sum(output.hidden, batch)
            total = total + self._config.mtp_weight * mtp_sum / totals.mtp_weight
        return total, float(loss.detach())

    def _mtp_loss_sum(self, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        rows = batch.mtp_rows
        after = self._policy.mtp_hidden(hidden.index_select(0, rows), batch.token_ids[rows + 1])
        logits, targets = self._policy.logits(after), rows + 2
        losses = F.cross_entropy(logits, batch.token_ids[targets], reduction="none")
        return (losses * batch.weights[targets]).sum()

    def _losses(
        self, hidden: torch.Tensor, batch: PackedBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return losses and weights, [M] each, of the tokens after hidden states [T, d]."""
        targets = batch.rows + 1
        states = hidden.index_select(0, batch.rows)
        scores = token_scores(self._policy, states, batch.token_ids[targets])
        return -scores.logprobs, batch.weights[targets]


def rate(config: MidtrainConfig, progress: float) -> float:
    """Return the factor of the learning rate at a spent share of the budget, 0..1."""
    if progress < config.warmup_fraction:
        # Not 0, or the first step would be lost.
        return max(progress / config.warmup_fraction, 0.01)
    if config.schedule == "cosine":
        done = (progress - config.warmup_fraction) / max(1 - config.warmup_fraction, 1e-9)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(done, 1.0)))
    left = (1 - progress) / max(config.decay_fraction, 1e-9)
    return 0.1 + 0.9 * min(1.0, max(0.0, left))
