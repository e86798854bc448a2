"""The trainer's forward pass over rollouts: logprobs of what was sampled, as `numerics` says."""

from collections.abc import Sequence

import numpy as np
import torch

from penstock.actors.policy.exact import ExactForward, ExactPass
from penstock.actors.policy.model import Policy, TakeValue, token_logprobs
from penstock.actors.policy.packing import PackedTree, pack_tree
from penstock.actors.trainer.sequences import TrainingSequence


class SequenceForward:
    """Forward passes with the weights that the policy has when this is made; threads share it."""

    def __init__(self, policy: Policy, temperature: float) -> None:
        """Take the policy, and the temperature that its rollouts were sampled at."""
        numerics = policy.config.numerics
        self._policy = policy
        self._temperature = temperature
        self._replays = numerics.replays
        self._exact = ExactForward(policy, numerics.plausible) if numerics.is_exact else None

    def logprobs(self, batch: Sequence[TrainingSequence]) -> tuple[torch.Tensor, float]:
        """Return the sampled tokens' logprobs, [N], and the share of routes that would change.

        In exact mode the values are the sampler's own, where the policy is.

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
        if self._exact is None:
            return self._run(tree, rows, targets, None)
        found = self._exact.run(tree, rows, targets, self._temperature)
        own, _ = self._run(tree, rows, targets, found)
        share = float(found.flips[:, 0].sum()) / max(tree.routed_experts.size, 1)
        return TakeValue.apply(own, found.logprobs), share

    def _run(
        self, tree: PackedTree, rows: np.ndarray, targets: np.ndarray, exact: ExactPass | None
    ) -> tuple[torch.Tensor, float]:
        """Run torch, on the exact states if there are any."""
        routes = torch.from_numpy(tree.routed_experts) if self._replays else None
        output = self._policy(
            torch.from_numpy(tree.input_ids),
            tree.lengths,
            routes if exact is None else exact.routed_experts,
            tree.parents,
            None if exact is None else exact.states,
        )
        logits = self._policy.logits(output.hidden.index_select(0, torch.from_numpy(rows)))
        if self._temperature != 1.0:
            logits = logits * (1.0 / self._temperature)
        return token_logprobs(logits, torch.from_numpy(targets)), output.router_mismatch
