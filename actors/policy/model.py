"""The policy: a transformer of Qwen3-MoE's or Qwen3's architecture, in plain torch.

Forward and backward give the same bits on every run on the CPU at a fixed thread count; exact
replay of training rests on that. Sequences are packed: `input_ids` is flat and `lengths` says
where each piece ends, so no work goes into padding; sequences that begin alike may share the pieces
of their beginning, so that no token is computed twice.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.actors.policy import operations
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.layers import (
    RoutedTokens,
    Segments,
    TransformerLayer,
    causal_mask,
    rotary_table,
    tree_mask,
)
from penstock.actors.policy.operations import TakeValue, rms_norm

WHOLE_SCORES_MAX = 1 << 28
"""On a GPU: elements of all heads' attention between all packed tokens, a gigabyte, up to which it
is computed at once; beyond, piece by piece."""


@dataclass(frozen=True)
class PolicyOutput:
    """What one forward pass over T packed tokens gives."""

    hidden: torch.Tensor
    """[T, d] after the final norm; `Policy.logits` turns the rows that matter into logits."""
    routed_experts: torch.Tensor
    """[T, L, K] int16: the experts each token went through, in slot order."""
    flips: torch.Tensor
    """[L] int64: how many recorded ids the router of each layer would not have chosen."""
    num_recorded: int
    """Recorded ids, in all layers."""
    balance_loss: torch.Tensor
    """0-dim: load balance, 1 when even (Switch Transformer, arXiv 2101.03961, equation 4); 0 in a
    dense model."""

    @property
    def router_mismatch(self) -> float:
        """The share of the recorded ids that the routers would not have chosen."""
        return float(self.flips.sum()) / max(self.num_recorded, 1)


class MtpHead(nn.Module):
    """Predicts the token after next from a hidden state and the next token's embedding.

    DeepSeek-V3's multi-token prediction (arXiv 2412.19437, section 2.2) without its transformer
    block: norm both, project [2d] to [d], then the shared output head. Mid-training only.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.hidden_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.embedding_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.output_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.projection = nn.Parameter(torch.empty(config.hidden_size, 2 * config.hidden_size))

    def forward(self, hidden: torch.Tensor, next_embedding: torch.Tensor) -> torch.Tensor:
        """[N, d] and [N, d] -> [N, d], to be put through `Policy.logits`."""
        left = rms_norm(hidden, self.hidden_norm, self.eps)
        right = rms_norm(next_embedding, self.embedding_norm, self.eps)
        mixed = F.linear(torch.cat((left, right), dim=-1), self.projection)
        return rms_norm(left + F.silu(mixed), self.output_norm, self.eps)


class Policy(nn.Module):
    """The language model that acts, and that RL improves.

    Example:
        >>> policy = Policy(PolicyConfig(), seed=0)
        >>> output = policy(torch.tensor([5, 6, 7, 5, 6]), lengths=[3, 2])
        >>> policy.logits(output.hidden).shape
        torch.Size([5, 1024])

    """

    cos: torch.Tensor
    """[max_position_embeddings, D/2] rotary table."""
    sin: torch.Tensor

    def __init__(self, config: PolicyConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.checkpoints_activations = False
        """Whether the backward pass computes each layer again instead of keeping what it made."""
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(
            TransformerLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        if not config.tie_word_embeddings:
            self.head = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        if config.mtp_num_heads:
            self.mtp = MtpHead(config)
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if seed is not None:
            self.initialize(seed)

    @property
    def device(self) -> torch.device:
        """Where it computes; its inputs must be there."""
        return self.cos.device

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Take the weights of a seed."""
        parameters = dict(self.named_parameters())
        for name, value in self.initial_weights(seed):
            parameters[name].copy_(value)

    def initial_weights(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights of a seed, whole and one by one, by the names of the parameters.

        Norms are 1, all others drawn from N(0, 0.02), residual outputs scaled down by sqrt(2L).
        """
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5
        for name, parameter in self.named_parameters():
            value = torch.ones(parameter.shape, device="cpu")
            if parameter.dim() > 1:
                std = residual if name.endswith(("attention.output", "experts.down")) else 0.02
                value.normal_(0.0, std, generator=generator)
            yield name, value

    def forward(
        self,
        input_ids: torch.Tensor,
        lengths: Sequence[int],
        routed_experts: torch.Tensor | None = None,
        parents: Sequence[int] | None = None,
        states: torch.Tensor | None = None,
    ) -> PolicyOutput:
        """Run the packed tokens.

        Args:
            input_ids: [T] int64, piece after piece.
            lengths: tokens of each piece, summing to T.
            routed_experts: [T, L, K] integer ids to replay; rows of `ROUTE_FREE` route freely.
            parents: for each piece the earlier one that it continues, or -1 where it begins a
                sequence; by default every piece is a whole sequence. `packing.py` makes them.
            states: [L, T, d] what each layer gives in another implementation, to continue
                with instead; `exact.py` makes them.

        Raises:
            ValueError: lengths that do not fit, or routes of the wrong shape.

        """
        segments = self._segments(input_ids, tuple(lengths), parents)
        recorded = self._checked_routes(input_ids, routed_experts)
        x = F.embedding(input_ids, self.embedding)
        routes, balance, flips = [], [], []
        for index, layer in enumerate(self.layers):
            replay = None if recorded is None else recorded[:, index]
            x, routing = self._run(layer, x, segments, replay)
            if states is not None:
                x = TakeValue.apply(x, states[index])
            routes.append(routing.recorded.to(torch.int16))
            balance.append(_balance(routing.recorded, routing.scores))
            flips.append(routing.flips)
        return PolicyOutput(
            hidden=rms_norm(x, self.final_norm, self.config.rms_norm_eps),
            routed_experts=torch.stack(routes, dim=1),
            flips=torch.stack(flips),
            num_recorded=0 if recorded is None else int((recorded >= 0).sum()),
            balance_loss=torch.stack(balance).mean(),
        )

    def _run(
        self, layer: nn.Module, x: torch.Tensor, segments: Segments, replay: torch.Tensor | None
    ) -> tuple[torch.Tensor, RoutedTokens]:
        if not self.checkpoints_activations:
            return layer(x, segments, replay)
        return checkpoint(layer, x, segments, replay, use_reentrant=False, preserve_rng_state=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[N, d] -> [N, vocab_size]."""
        return F.linear(hidden, self.embedding if self.config.tie_word_embeddings else self.head)

    def mtp_hidden(self, hidden: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Hidden states [N, d] and the next tokens [N] -> states that predict the ones after."""
        return self.mtp(hidden, F.embedding(next_ids, self.embedding))

    def _segments(
        self, input_ids: torch.Tensor, lengths: tuple[int, ...], parents: Sequence[int] | None
    ) -> Segments:
        if input_ids.dim() != 1 or sum(lengths) != input_ids.numel() or min(lengths) < 1:
            raise ValueError(
                f"lengths must be positive and sum to the {input_ids.numel()} packed input_ids"
            )
        ancestors = ancestors_of(len(lengths), parents)
        starts = [sum(lengths[i] for i in before) for before in ancestors]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        if max(ends) > self.config.max_position_embeddings:
            raise ValueError(
                f"a sequence of {max(ends)} tokens exceeds max_position_embeddings "
                f"{self.config.max_position_embeddings}"
            )
        spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        device = input_ids.device
        num_scores = self.config.num_attention_heads * input_ids.numel() ** 2
        is_one_call = operations.has_kernels(input_ids) and num_scores <= WHOLE_SCORES_MAX
        return Segments(
            lengths=lengths,
            ancestors=ancestors,
            masks=()
            if is_one_call
            else tuple(
                causal_mask(length, start, device)
                for length, start in zip(lengths, starts, strict=True)
            ),
            whole_mask=tree_mask(lengths, ancestors, device) if is_one_call else None,
            cos=torch.cat([self.cos[span] for span in spans]).unsqueeze(1),
            sin=torch.cat([self.sin[span] for span in spans]).unsqueeze(1),
        )

    def _checked_routes(
        self, input_ids: torch.Tensor, routed_experts: torch.Tensor | None
    ) -> torch.Tensor | None:
        if routed_experts is None:
            return None
        config = self.config
        shape = (input_ids.numel(), config.num_hidden_layers, config.num_experts_per_tok)
        if tuple(routed_experts.shape) != shape:
            raise ValueError(
                f"routed_experts must be {shape} (tokens, layers, slots), "
                f"not {tuple(routed_experts.shape)}"
            )
        if routed_experts.numel() and int(routed_experts.max()) >= config.num_experts:
            raise ValueError(f"routed_experts must be below num_experts {config.num_experts}")
        return routed_experts.to(torch.int64)


def ancestors_of(count: int, parents: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Return the pieces that each piece continues, first to last."""
    if parents is None:
        return ((),) * count
    if len(parents) != count or any(not -1 <= p < i for i, p in enumerate(parents)):
        raise ValueError("parents must give each piece an earlier one, or -1")
    chains: list[tuple[int, ...]] = []
    for parent in parents:
        chains.append(() if parent < 0 else (*chains[parent], parent))
    return tuple(chains)


def _balance(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """E * sum over experts of (share of slots) * (mean score)."""
    num_experts = scores.shape[1]
    share = torch.bincount(ids.reshape(-1), minlength=num_experts) / max(ids.numel(), 1)
    return num_experts * (share * scores.mean(0)).sum()
