"""The trainer's forward pass over rollouts: logprobs of what was sampled, as `numerics` says."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from penstock.actors.policy.exact import ExactForward, ExactPass, LogprobRequest
from penstock.actors.policy.model import Policy
from penstock.actors.policy.operations import TakeValue
from penstock.actors.policy.packing import PackedTree, pack_tree
from penstock.actors.trainer.distribution import shaped, temperatures_of
from penstock.actors.trainer.objective.token_scores import Draws, Entropy, token_scores
from penstock.actors.trainer.sequences import TrainingSequence


@dataclass(frozen=True, kw_only=True)
class ForwardOutput:
    """What a forward pass gives for a batch with N sampled tokens, T tokens once shared."""

    logprobs: torch.Tensor
    """[N] of the sampled tokens, on the host, where losses are computed; in exact mode the
    sampler's own values."""
    entropies: torch.Tensor
    """[N] of the distributions that the tokens were drawn from, on the host; [0] if not asked
    for."""
    router_mismatch: float
    """Share of the recorded routes that the routers would not have chosen."""
    recorded: np.ndarray
    """[T, L, K] the sampler's experts."""
    used: np.ndarray
    """[T, L, K] those of this pass: the recorded ones, but for what `numerics` says."""


class SequenceForward:
    """Forward passes with the weights that the policy has when this is made; threads share it."""

    def __init__(self, policy: Policy, *, replays: bool | None = None) -> None:
        """Prepare the passes.

        Args:
            policy: the trainer's.
            replays: whether recorded routes are used; by default as the policy's numerics say.

        """
        numerics = policy.config.numerics
        self._policy = policy
        self._replays = numerics.replays if replays is None else replays
        self._exact = ExactForward(policy, numerics.plausible) if numerics.is_exact else None

    def run(self, batch: Sequence[TrainingSequence], entropy: Entropy = "none") -> ForwardOutput:
        """Run a batch as a tree of what its sequences share.

        Args:
            batch: N sampled tokens.
            entropy: which entropies are needed.

        Raises:
            ExactModeError: Exact mode, and no compiled step.

        """
        tree = pack_tree(
            [sequence.token_ids[:-1] for sequence in batch],
            [sequence.routed_experts for sequence in batch],
        )
        rows = np.concatenate(
            [places[s.sampled_at - 1] for s, places in zip(batch, tree.places, strict=True)]
        )
        targets = np.concatenate([s.token_ids[s.sampled_at] for s in batch])
        draws = [(each.token_ids, draw) for each in batch for draw in each.draws]
        wanted = LogprobRequest(
            rows=rows,
            targets=targets,
            temperatures=temperatures_of([draw for _, draw in draws]),
            shape=partial(shaped, draws=draws),
        )
        if self._exact is None:
            return self._run(tree, wanted, None, draws, entropy)
        exact = self._exact.run(tree, wanted)
        own = self._run(tree, wanted, exact, draws, entropy)
        return ForwardOutput(
            logprobs=TakeValue.apply(own.logprobs, exact.logprobs),
            entropies=own.entropies,
            router_mismatch=float(exact.flips[:, 0].sum()) / max(tree.routed_experts.size, 1),
            recorded=own.recorded,
            used=own.used,
        )

    def _run(
        self,
        tree: PackedTree,
        wanted: LogprobRequest,
        exact: ExactPass | None,
        draws: Draws,
        entropy: Entropy,
    ) -> ForwardOutput:
        """Run torch, on the exact states if there are any."""
        routes = self._placed(tree.routed_experts) if self._replays else None
        output = self._policy(
            self._placed(tree.input_ids),
            tree.lengths,
            routes if exact is None else exact.routed_experts,
            tree.parents,
            None if exact is None else exact.states,
        )
        rows = self._placed(wanted.rows)
        hidden, targets = output.hidden.index_select(0, rows), self._placed(wanted.targets)
        scores = token_scores(self._policy, hidden, targets, draws, entropy)
        return ForwardOutput(
            logprobs=scores.logprobs.cpu(),
            entropies=scores.entropies.cpu(),
            router_mismatch=output.router_mismatch,
            recorded=tree.routed_experts,
            used=output.routed_experts.cpu().numpy(),
        )

    def _placed(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._policy.device)
