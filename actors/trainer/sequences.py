"""Training sequences from logged turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.actors.policy.config import ForeignArithmeticError, PolicyConfig
from penstock.actors.trainer.distribution import (
    GreedyTurnError,
    NotReproducibleError,
    TurnDraw,
    draw_of,
)
from penstock.actors.trainer.routes import no_routes, rollout_routes
from penstock.kernels.arrays import from_array
from penstock.messages.reading.trajectories import segments
from penstock.messages.rollout import Turn
from penstock.messages.training import SampleEntry, TrunkCredit


@dataclass(frozen=True, kw_only=True)
class TrainingSequence:
    """One segment of a rollout, or turns of a session, token by token.

    Shapes: T tokens, of which N are sampled and trained; L layers; K experts per token.

    """

    rollout_id: str
    num_inputs: int
    """Tokens that the model reads, T - 1: all but the last."""
    token_ids: np.ndarray
    """[T] int64: context and sampled tokens of all turns."""
    sampled_at: np.ndarray
    """Positions of the trained tokens, [N] int64, ascending, > 0. Forced and withheld tokens are
    context."""
    draws: tuple[TurnDraw, ...]
    """Distributions of each turn's tokens; N tokens together."""
    is_trained: np.ndarray
    """Trained tokens among all M sampled ones, bool [M]; forced and withheld ones are not."""
    versions: np.ndarray
    """Policy version that sampled each token, [N] int64."""
    behavior_logprobs: np.ndarray
    """Logprobs recorded by the sampler, [N] float32."""
    routed_experts: np.ndarray
    """Routes of the positions that predict a token, [T - 1, L, K] uint8 or wider; K is 0 in a dense
    model."""
    advantages: np.ndarray
    """Advantage of each token, [N] float32."""
    engine_logprobs: np.ndarray | None = None
    """Logprobs under the version that sampled each token, computed by the trainer, [N] float32; NaN
    if that version is not kept or is the trained one."""
    reference_logprobs: np.ndarray | None = None
    """Logprobs under version 0, [N] float32."""
    proximal_logprobs: np.ndarray | None = None
    """Logprobs under the policy at the start of the step, [N] float32, set after its first pass."""
    weight: float = 1.0
    is_live: bool = False
    """Whether a user's request was sampled, by the version that served it."""
    live_version: int | None = None
    """Single version that sampled all tokens of a live sample, if there is one."""

    sampled_by: frozenset[int] = frozenset()
    """Versions that sampled the trained tokens of its sample."""

    def outline(self) -> "TrainingSequence":
        """Return a copy without tokens and routes, for processes that do not compute it."""
        none = np.zeros(0, np.int64)
        return replace(self, token_ids=none, sampled_at=none, draws=(), routed_experts=none)


def training_sequence(
    rollout_id: str,
    turns: Sequence[Turn],
    config: PolicyConfig,
    advantage: float | np.ndarray,
    trained_from: int = 0,
) -> TrainingSequence:
    """Concatenate the turns of a segment.

    Args:
        rollout_id: Rollout of the segment.
        turns: Turns of one context.
        config: Configuration of the policy.
        advantage: Advantage of all sampled tokens, forced ones included, or one per token.

    Raises:
        NotReproducibleError, GreedyTurnError: A turn cannot be trained.
        ValueError: An array does not match `Turn`; the text names the rollout and the turn. For
            routes, the subclasses that `rollout_routes` raises.

    """
    try:
        parts = [_turn_arrays(turn) for turn in turns]
        draws = _draws(turns, config.vocab_size, trained_from)
        routes = no_routes(turns, config) if config.is_dense else rollout_routes(turns)
    except ValueError as error:
        raise type(error)(f"rollout {rollout_id}: {error}") from error
    token_ids, is_sampled, logprobs, versions = (
        np.concatenate(part) for part in zip(*parts, strict=True)
    )
    sampled_at = np.flatnonzero(is_sampled)
    if sampled_at[0] == 0:
        raise ValueError(f"rollout {rollout_id}: the first turn has no context")
    trained_at = np.concatenate([draw.start + draw.at for draw in draws])
    is_trained = np.isin(sampled_at, trained_at)
    return TrainingSequence(
        rollout_id=rollout_id,
        num_inputs=token_ids.size - 1,
        token_ids=token_ids,
        sampled_at=trained_at,
        draws=draws,
        is_trained=is_trained,
        versions=versions[is_trained],
        behavior_logprobs=logprobs[is_trained],
        routed_experts=routes,
        advantages=np.full(sampled_at.size, advantage, np.float32)[is_trained],
    )


def sample_sequences(
    sample: SampleEntry, turns: Sequence[Turn], config: PolicyConfig, live_weight: float
) -> list[TrainingSequence]:
    """Return the sequences of a manifest's sample, a rollout or a live one.

    Raises:
        ValueError: As in `training_sequence`.

    """
    if sample.num_turns:
        return _session_sequences(sample, turns, config, live_weight * sample.weight)
    return rollout_sequences(sample, turns, config)


def rollout_sequences(
    sample: SampleEntry, turns: Sequence[Turn], config: PolicyConfig
) -> list[TrainingSequence]:
    """Return a rollout's sequences: one per segment, all with the rollout's advantage.

    Raises:
        ValueError: As in `training_sequence`.

    """
    name, since = sample.rollout_id, sample.trained_from
    values = _advantages(_num_sampled(turns), sample.advantage, sample.trunk)
    found: list[TrainingSequence] = []
    start = 0
    for segment in segments(turns):
        end = start + _num_sampled(segment)
        part = values[start:end]
        found.append(training_sequence(name, segment, config, part, trained_from=since))
        start = end
    return found


def _num_sampled(turns: Sequence[Turn]) -> int:
    return sum(turn.summary.num_sampled for turn in turns)


def _session_sequences(
    sample: SampleEntry, turns: Sequence[Turn], config: PolicyConfig, weight: float
) -> list[TrainingSequence]:
    """Return a live sample's sequences; a turn that continues the one before extends its sequence.

    A turn continues the one before if its context begins with all of that turn's tokens, routed
    alike.
    Other shared prefixes are still computed once (`actors/policy/packing.py`).

    Args:
        sample: Entry of the manifest.
        turns: Turns of its requests, each with its whole context.
        config: Configuration of the policy.
        weight: Weight of all tokens.

    """
    values = sample.turn_advantages or [sample.advantage] * len(turns)
    found: list[TrainingSequence] = []
    for turn, value in zip(turns, values, strict=True):
        sequence = training_sequence(sample.rollout_id, [turn], config, value)
        if found and _continues(found[-1], sequence):
            sequence = _joined(found.pop(), sequence)
        found.append(sequence)
    return [replace(one, weight=weight) for one in found]


def _continues(before: TrainingSequence, after: TrainingSequence) -> bool:
    num_tokens = before.token_ids.size
    return (
        after.draws[0].start >= num_tokens
        and np.array_equal(after.token_ids[:num_tokens], before.token_ids)
        # Equal tokens with other routes would be another computation: the model under training must
        # follow the sampler's.
        and np.array_equal(after.routed_experts[: num_tokens - 1], before.routed_experts)
    )


def _joined(before: TrainingSequence, after: TrainingSequence) -> TrainingSequence:
    return replace(
        after,
        sampled_at=np.concatenate([before.sampled_at, after.sampled_at]),
        draws=before.draws + after.draws,
        is_trained=np.concatenate([before.is_trained, after.is_trained]),
        versions=np.concatenate([before.versions, after.versions]),
        behavior_logprobs=np.concatenate([before.behavior_logprobs, after.behavior_logprobs]),
        advantages=np.concatenate([before.advantages, after.advantages]),
    )


def _advantages(num_tokens: int, advantage: float, trunk: TrunkCredit | None) -> np.ndarray:
    """Return advantages [N] float32; tokens of a trunk share the credit of its branches."""
    values = np.full(num_tokens, advantage, np.float32)
    if trunk is not None:
        values[: trunk.num_tokens] = trunk.advantage
    return values


def check_sample(sample: SampleEntry, turns: Sequence[Turn], config: PolicyConfig) -> list[int]:
    """Refuse a sample that the policy cannot be trained on; as `check_trajectory`."""
    if not sample.num_turns:
        return check_trajectory(sample.rollout_id, turns, config, sample.trained_from)
    _check_samplers(sample.rollout_id, turns, config)
    return _checked(sample.rollout_id, _session_sequences(sample, turns, config, 1.0), config)


def check_trajectory(
    rollout_id: str, turns: Sequence[Turn], config: PolicyConfig, trained_from: int = 0
) -> list[int]:
    """Refuse a rollout that the policy cannot be trained on; one without turns passes.

    Returns:
        Number of tokens that the model reads, for each sequence.

    Raises:
        NotReproducibleError, GreedyTurnError: It is well-formed and cannot be trained.
        ValueError: It is malformed; the text says what was expected.

    """
    _check_samplers(rollout_id, turns, config)
    found = [
        training_sequence(rollout_id, part, config, 0.0, trained_from=trained_from)
        for part in segments(turns)
    ]
    return _checked(rollout_id, found, config)


def _check_samplers(rollout_id: str, turns: Sequence[Turn], config: PolicyConfig) -> None:
    try:
        for turn in turns:
            config.numerics.check_sampler(turn.arithmetic)
    except ForeignArithmeticError as error:
        raise NotReproducibleError(f"rollout {rollout_id}: {error}") from error


def _checked(
    rollout_id: str, sequences: Sequence[TrainingSequence], config: PolicyConfig
) -> list[int]:
    """Check every sequence; return the number of inputs of each."""
    shape = (config.num_hidden_layers, config.num_experts_per_tok)
    longest = config.max_position_embeddings
    for one in sequences:
        routes, tokens = one.routed_experts, one.token_ids
        _require(routes.shape[1:] == shape, f"routed_experts: expected (layers, slots) {shape}")
        _require(_within(routes, config.num_experts), f"routed_experts: below {config.num_experts}")
        _require(_within(tokens, config.vocab_size), f"token_ids: below {config.vocab_size}")
        _require(one.num_inputs <= longest, f"token_ids: at most {longest}, got {tokens.size}")
        finite = bool(np.isfinite(one.behavior_logprobs).all())
        _require(finite, "behavior_logprobs: expected finite numbers")
    if sequences and not sum(one.sampled_at.size for one in sequences):
        raise GreedyTurnError(f"rollout {rollout_id}: each of its tokens was forced or withheld")
    return [one.num_inputs for one in sequences]


def _draws(turns: Sequence[Turn], vocab_size: int, trained_from: int) -> tuple[TurnDraw, ...]:
    draws: list[TurnDraw] = []
    position = 0
    for turn in turns:
        position += turn.summary.num_context
        draws.append(draw_of(turn, position, vocab_size).since(trained_from, turn.version_spans))
        position += turn.summary.num_sampled
    return tuple(draws)


def _turn_arrays(turn: Turn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return token_ids [P + N], is_sampled [P + N], logprobs [N], versions [N]."""
    context, sampled = from_array(turn.context_ids), from_array(turn.token_ids)
    logprobs = from_array(turn.behavior_logprobs)
    if context.ndim != 1 or sampled.ndim != 1 or sampled.size == 0:
        raise ValueError(
            f"expected flat token ids, at least one sampled, got {context.shape}, {sampled.shape}"
        )
    if logprobs.shape != sampled.shape:
        raise ValueError(f"behavior_logprobs: expected shape {sampled.shape}, got {logprobs.shape}")
    if sum(span.num_tokens for span in turn.version_spans) != sampled.size:
        raise ValueError(f"version_spans: expected {sampled.size} tokens, got another sum")
    tokens = np.concatenate([context, sampled]).astype(np.int64)
    is_sampled = np.arange(tokens.size) >= context.size
    versions = np.repeat(
        [span.policy_version for span in turn.version_spans],
        [span.num_tokens for span in turn.version_spans],
    )
    return tokens, is_sampled, logprobs, versions


def _within(values: np.ndarray, bound: int) -> bool:
    return values.size == 0 or bool(values.min() >= 0 and values.max() < bound)


def _require(condition: bool, expectation: str) -> None:
    if not condition:
        raise ValueError(expectation)
