"""Which experts a token goes to: chosen from its scores, or replayed from the sampler's record."""

import torch
from torch import nn
from torch.nn import functional as F

from penstock.actors.policy.config import PolicyConfig

ROUTE_FREE = -1
"""An expert id that means: no route was recorded here, use the router's own choice."""


class Router(nn.Module):
    """Chooses experts, or replays the choice of another forward pass."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.num_chosen = config.num_experts_per_tok
        self.normalize = config.norm_topk_prob
        self.plausible = config.numerics.plausible
        self.dtype = torch.float32 if config.numerics.has_exact_gate else torch.bfloat16
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(
        self, x: torch.Tensor, recorded: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Route [T, d].

        Args:
            recorded: [T, K] expert ids to use instead of the router's, in slot order; a row that
                starts with `ROUTE_FREE` is routed freely. Weights always come from the scores of
                this pass, so gradients reach the router.

        Returns:
            ids [T, K] int64, weights [T, K], scores [T, E], and how many recorded ids the
            router itself would not have chosen (0-dim int64).

        """
        logits = F.linear(x.to(self.dtype), self.weight.to(self.dtype)).float()
        scores = logits.softmax(-1)
        own = scores.detach().topk(self.num_chosen, dim=-1).indices
        ids, flips = own, own.new_zeros(())
        if recorded is not None:
            is_recorded = recorded[:, :1] != ROUTE_FREE
            ids = torch.where(is_recorded, recorded, own)
            flips = (ids.unsqueeze(2) != own.unsqueeze(1)).all(2).sum()
            if self.plausible > 0.0:
                ids = replace_implausible(ids, scores.detach(), self.plausible)
        weights = scores.gather(1, ids)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights, scores, flips


def replace_implausible(ids: torch.Tensor, scores: torch.Tensor, plausible: float) -> torch.Tensor:
    """Put, slot by slot, the best expert not among the others where one is too unlikely.

    Args:
        ids: [T, K] replayed experts.
        scores: [T, E] probabilities of this pass.
        plausible: the least probability that a replayed expert may have.

    Returns:
        [T, K] ids (Composer 2, arXiv 2603.24477).

    """
    kept = scores.gather(1, ids) >= plausible
    # Taken experts sink below every probability; an implausible one may come back as the best.
    left = scores.scatter_add(1, ids, torch.where(kept, -2.0, 0.0))
    slots = []
    for slot in range(ids.shape[1]):
        best = left.argmax(1, keepdim=True)
        slots.append(torch.where(kept[:, slot : slot + 1], ids[:, slot : slot + 1], best))
        left = left.scatter_add(1, best, torch.where(kept[:, slot : slot + 1], 0.0, -2.0))
    return torch.cat(slots, dim=1)
