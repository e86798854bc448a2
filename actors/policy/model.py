"""The policy: a transformer as Qwen3-MoE, Qwen3, Llama and Qwen2 are, in plain torch.

On the CPU at a fixed thread count, forward and backward passes give the same bits in every run;
exact replay of training depends on that. Sequences are packed: `input_ids` is flat and `lengths`
says where each piece ends, so there is no padding. Sequences with a common prefix may share its
pieces, so no token is computed twice.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.actors.policy.adapter import LowRank, initial_adapters, is_adapter, tensor_name
from penstock.actors.policy.config import PolicyConfig
from penstock.actors.policy.layers import (
    RoutedTokens,
    Segments,
    TransformerLayer,
    causal_mask,
    rotary_table,
)
from penstock.actors.policy.operations import TakeValue, rms_norm


@dataclass(frozen=True)
class PolicyOutput:
    """Output of one forward pass over T packed tokens."""

    hidden: torch.Tensor
    """Hidden states after the final norm, [T, d]; `Policy.logits` converts the rows needed."""
    routed_experts: torch.Tensor
    """Experts of each token in slot order, int16 [T, L, K]."""
    flips: torch.Tensor
    """Number of replayed ids that the router of each layer would not have chosen, int64 [L]."""
    num_recorded: int
    """Number of replayed ids in all layers."""
    balance_loss: torch.Tensor
    """Load-balancing loss, 1 when even, 0 in a dense model; scalar (Switch Transformer, arXiv
    2101.03961, equation 4)."""

    @property
    def router_mismatch(self) -> float:
        """Fraction of the replayed ids that the routers would not have chosen."""
        return float(self.flips.sum()) / max(self.num_recorded, 1)


class MtpHead(nn.Module):
    """Head that predicts the token after next from a hidden state and the next token's embedding.

    DeepSeek-V3's multi-token prediction (arXiv 2412.19437, section 2.2) without its transformer
    block: normalize both, project [2d] to [d], then the shared output head. Mid-training only.
    """

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.hidden_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.embedding_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.output_norm = nn.Parameter(torch.ones(config.hidden_size))
        self.projection = nn.Parameter(torch.empty(config.hidden_size, 2 * config.hidden_size))

    def forward(self, hidden: torch.Tensor, next_embedding: torch.Tensor) -> torch.Tensor:
        """Combine [N, d] and [N, d] to states [N, d], which are passed to `Policy.logits`."""
        left = rms_norm(hidden, self.hidden_norm, self.eps)
        right = rms_norm(next_embedding, self.embedding_norm, self.eps)
        mixed = F.linear(torch.cat((left, right), dim=-1), self.projection)
        return rms_norm(left + F.silu(mixed), self.output_norm, self.eps)


class Policy(nn.Module):
    """The language model that RL trains.

    Example:
        >>> policy = Policy(PolicyConfig(), seed=0)
        >>> output = policy(torch.tensor([5, 6, 7, 5, 6]), lengths=[3, 2])
        >>> policy.logits(output.hidden).shape
        torch.Size([5, 1024])

    """

    num_logits_max: int = sys.maxsize
    """Maximum logits of one product, over which the trainer computes them in chunks of rows."""
    cos: torch.Tensor
    """Rotary cosines, [max_position_embeddings, D/2]."""
    sin: torch.Tensor
    """Rotary sines, [max_position_embeddings, D/2]."""

    def __init__(self, config: PolicyConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config = config
        self.checkpoints_activations = False
        """Whether the backward pass recomputes each layer instead of storing its activations."""
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
        # Derived from the configuration, so not part of a checkpoint.
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        if config.adapter is not None:  # The base stays as it is.
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))
        if seed is not None:
            self.initialize(seed)

    @property
    def device(self) -> torch.device:
        """Device of the policy, where its inputs must be as well."""
        return self.cos.device

    @torch.no_grad()
    def initialize(self, seed: int) -> None:
        """Set the initial weights of a seed."""
        parameters = dict(self.named_parameters())
        for name, value in self.initial_weights(seed):
            parameters[name].copy_(value)

    def initial_weights(self, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the initial weights of a seed, one unsharded tensor at a time, by parameter name.

        Norms are 1 and biases 0; all others are drawn from N(0, 0.02), residual outputs scaled by
        1/sqrt(2L).
        """
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / (2 * self.config.num_hidden_layers) ** 0.5
        shapes: dict[str, tuple[int, ...]] = {}
        names: dict[str, str] = {}
        for name, parameter in self.named_parameters():
            if is_adapter(name):
                names[tensor_name(name)] = name
                shapes[tensor_name(name)] = tuple(parameter.shape)
                continue
            fill = 0.0 if name.endswith("_bias") else 1.0
            value = torch.full(parameter.shape, fill, device="cpu")
            if parameter.dim() > 1:
                std = residual if name.endswith(("attention.output", "experts.down")) else 0.02
                value.normal_(0.0, std, generator=generator)
            yield name, value
        yield from ((names[name], value) for name, value in initial_adapters(shapes, seed))

    def set_adapter_scale(self, scale: float) -> None:
        """Set the factor of all adapters' products; 0 leaves the base alone."""
        for module in self.modules():
            if isinstance(module, LowRank):
                module.scale = scale

    def forward(
        self,
        input_ids: torch.Tensor,
        lengths: Sequence[int],
        routed_experts: torch.Tensor | None = None,
        parents: Sequence[int] | None = None,
        states: torch.Tensor | None = None,
    ) -> PolicyOutput:
        """Run a forward pass over packed tokens.

        Args:
            input_ids: Token ids of all pieces, int64 [T].
            lengths: Number of tokens of each piece, summing to T.
            routed_experts: Expert ids to replay, integers [T, L, K]; rows of `ROUTE_FREE` are
                routed freely.
            parents: Earlier piece that each piece continues, or -1 if it starts a sequence
                (`packing.py`); by default every piece is a whole sequence.
            states: Outputs of each layer in another implementation, [L, T, d], which replace this
                one's (`exact.py`).

        Raises:
            ValueError: The lengths or parents are invalid, or the routes have the wrong shape.

        """
        segments = self._segments(input_ids, tuple(lengths), parents)
        recorded = self._checked_routes(input_ids, routed_experts)
        x = F.embedding(input_ids, self.embedding)
        routes, balance, flips = [], [], []
        for index, layer in enumerate(self.layers):
            replay = None if recorded is None else recorded[:, index]
            x, routing = self._run(layer, x, segments, replay)
            # The next layer gets the exact value, and gradients of this layer are taken at it.
            if states is not None:
                x = TakeValue.apply(x, states[index])
            # int16 holds any id: `num_experts` is at most 2**15.
            routes.append(routing.recorded.to(torch.int16))
            balance.append(_balance(routing.recorded, routing.scores))
            flips.append(routing.flips)
        return PolicyOutput(
            hidden=rms_norm(x, self.final_norm, self.config.rms_norm_eps),
            routed_experts=torch.stack(routes, dim=1),
            flips=torch.stack(flips),
            # `ROUTE_FREE` is negative.
            num_recorded=0 if recorded is None else int((recorded >= 0).sum()),
            balance_loss=torch.stack(balance).mean(),
        )

    def _run(
        self, layer: nn.Module, x: torch.Tensor, segments: Segments, replay: torch.Tensor | None
    ) -> tuple[torch.Tensor, RoutedTokens]:
        if not self.checkpoints_activations:
            return layer(x, segments, replay)
        # No layer draws random numbers, so there is no random state to preserve.
        return checkpoint(layer, x, segments, replay, use_reentrant=False, preserve_rng_state=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [N, vocab_size] for hidden states [N, d]."""
        return F.linear(hidden, self.embedding if self.config.tie_word_embeddings else self.head)

    def head_weights(self) -> list[torch.Tensor]:
        """Return the tensors whose gradients `logits` has."""
        return [self.embedding if self.config.tie_word_embeddings else self.head]

    def mtp_hidden(self, hidden: torch.Tensor, next_ids: torch.Tensor) -> torch.Tensor:
        """Return states [N, d] that predict the token after next.

        Args:
            hidden: Hidden states, [N, d].
            next_ids: Ids of the next tokens, [N].

        """
        return self.mtp(hidden, F.embedding(next_ids, self.embedding))

    def _segments(
        self, input_ids: torch.Tensor, lengths: tuple[int, ...], parents: Sequence[int] | None
    ) -> Segments:
        if input_ids.dim() != 1 or sum(lengths) != input_ids.numel() or min(lengths) < 1:
            raise ValueError(
                f"lengths: expected positive numbers that sum to {input_ids.numel()}, the number "
                f"of packed input_ids, got a sum of {sum(lengths)}"
            )
        ancestors = ancestors_of(len(lengths), parents)
        starts = [sum(lengths[i] for i in before) for before in ancestors]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        if max(ends) > self.config.max_position_embeddings:
            raise ValueError(
                f"input_ids: a sequence of {max(ends)} tokens exceeds max_position_embeddings "
                f"{self.config.max_position_embeddings}"
            )
        spans = [slice(start, end) for start, end in zip(starts, ends, strict=True)]
        return Segments(
            lengths=lengths,
            ancestors=ancestors,
            masks=tuple(map(causal_mask, lengths, starts)),
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
                f"routed_experts: expected shape {shape} (tokens, layers, slots), "
                f"got {tuple(routed_experts.shape)}"
            )
        if routed_experts.numel() and int(routed_experts.max()) >= config.num_experts:
            text = f"expected ids below num_experts, {config.num_experts}"
            raise ValueError(f"routed_experts: {text}, got {int(routed_experts.max())}")
        return routed_experts.to(torch.int64)


def ancestors_of(count: int, parents: Sequence[int] | None) -> tuple[tuple[int, ...], ...]:
    """Return the ancestors of each piece, first to last."""
    if parents is None:
        return ((),) * count
    if len(parents) != count or any(not -1 <= p < i for i, p in enumerate(parents)):
        raise ValueError(f"parents: expected an earlier piece or -1 for each of {count} pieces")
    chains: list[tuple[int, ...]] = []
    for parent in parents:
        chains.append(() if parent < 0 else (*chains[parent], parent))
    return tuple(chains)


def _balance(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Return E * sum over experts of (share of slots) * (mean score)."""
    num_experts = scores.shape[1]
    share = torch.bincount(ids.reshape(-1), minlength=num_experts) / max(ids.numel(), 1)
    return num_experts * (share * scores.mean(0)).sum()
