"""Recorded routes of a rollout: joined over its turns, and refused if they do not fit.

A turn's segments follow those of the turn before. They may also begin earlier: the sampler then
computed those positions again, and its later routes count. Nothing is ever filled in.
"""

from collections.abc import Sequence

import numpy as np

from penstock.actors.policy.config import PolicyConfig
from penstock.kernels.route_segments import open_routes
from penstock.messages.errors import PenstockError
from penstock.messages.rollout import Turn, VersionSpan


class MissingRoutesError(PenstockError, ValueError):
    """Input positions lack recorded routes."""


class StaleRoutesError(PenstockError, ValueError):
    """Recorded routes belong to another policy version, or to other tokens, than those to train."""


def rollout_routes(turns: Sequence[Turn]) -> np.ndarray:
    """Return the experts [T - 1, L, K] of the predicting positions of a rollout of T tokens.

    Raises:
        MissingRoutesError: No turn recorded some positions.
        StaleRoutesError: Routes are older than the tokens that followed from them, or belong to
            other positions.
        CorruptDataError: The bytes are not those that were sealed.

    """
    parts: list[np.ndarray] = []
    covered = end = 0
    for index, turn in enumerate(turns):
        end += turn.context_ids.shape[0] + turn.token_ids.shape[0]
        first, routes = _turn_routes(turn)
        if first > covered or first + len(routes) < end - 1:
            raise MissingRoutesError(
                f"routed_experts cover {first} to {first + len(routes) - 1} in turn {index}, "
                f"expected {covered} to {end - 2}; a missing route is never guessed"
            )
        if first + len(routes) > end - 1:
            raise StaleRoutesError(f"turn {index}: routes beyond position {end - 2}, its last")
        # Recomputed positions: the later routes produced the tokens that follow.
        if first < covered:
            parts = [np.concatenate(parts)[:first]]
        parts.append(routes)
        covered = end - 1
    if len({part.shape[1:] for part in parts}) > 1:
        raise StaleRoutesError("turns with routes of different models")
    return np.concatenate(parts)


def no_routes(turns: Sequence[Turn], config: PolicyConfig) -> np.ndarray:
    """Return the empty routes [T - 1, L, 0] of a rollout of a dense model.

    Raises:
        StaleRoutesError: Routes were recorded, so another model sampled it.

    """
    if any(turn.route_segments for turn in turns):
        raise StaleRoutesError("routes of a model with experts, the policy is dense")
    total = sum(turn.context_ids.shape[0] + turn.token_ids.shape[0] for turn in turns)
    return np.zeros((max(total - 1, 0), config.num_hidden_layers, 0), np.uint8)


def route_bytes(turns: Sequence[Turn]) -> int:
    """Return the bytes of a rollout's sealed routes, headers included."""
    return sum(len(segment) for turn in turns for segment in turn.route_segments)


def _turn_routes(turn: Turn) -> tuple[int, np.ndarray]:
    """Return the first position and the ids of one turn."""
    if not turn.route_segments:
        raise MissingRoutesError("a turn without routes")
    opened = [open_routes(segment) for segment in turn.route_segments]
    starts = [segment.first_position for segment in opened]
    ends = [segment.first_position + len(segment.routes) for segment in opened]
    if starts[1:] != ends[:-1]:
        raise MissingRoutesError(f"route segments end at {ends} and begin at {starts}")
    versions = np.repeat(
        [segment.policy_version for segment in opened], [len(each.routes) for each in opened]
    )
    _check_versions(versions, turn.version_spans)
    if len({segment.routes.shape[1:] for segment in opened}) > 1:
        raise StaleRoutesError("route segments of different models")
    return starts[0], np.concatenate([segment.routes.numpy() for segment in opened])


def _check_versions(versions: np.ndarray, spans: Sequence[VersionSpan]) -> None:
    """Refuse routes older than the tokens that followed from them.

    The last N positions produced the turn's N tokens. Newer routes belong to positions that were
    computed again after a token was sampled.

    """
    tokens = np.repeat([span.policy_version for span in spans], [span.num_tokens for span in spans])
    routes = versions[max(len(versions) - len(tokens), 0) :]
    if len(routes) < len(tokens):
        raise MissingRoutesError(f"{len(routes)} routed positions for {len(tokens)} tokens")
    older = np.flatnonzero(routes < tokens)
    if older.size:
        at = int(older[0])
        raise StaleRoutesError(
            f"sampled token {at} is of policy version {tokens[at]}, its routes of {routes[at]}"
        )
