"""Which experts a token goes to: chosen from its scores, or replayed from the sampler's record."""

import torch
from torch import nn
from torch.nn import functional as F

from penstock.actors.policy.config import PolicyConfig
from penstock.kernels.reference.routing import replay_experts


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
        ids = scores.detach().topk(self.num_chosen, dim=-1).indices
        flips = ids.new_zeros(())
        if recorded is not None:
            choice = replay_experts(ids, scores.detach(), recorded, self.plausible)
            ids, flips = choice.ids, choice.num_mismatched.sum()
        weights = scores.gather(1, ids)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return ids, weights, scores, flips
