"""The policy's shape, in the field names of Qwen3-MoE's `config.json`. Imports no torch."""

from typing import Annotated

import msgspec

from penstock.actors.policy.numerics import BLOCKS, NumericsConfig
from penstock.messages.errors import ConfigError
from penstock.messages.settings import PositiveFloat, PositiveInt


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the mixture-of-experts transformer; the defaults make 1.9M parameters."""

    vocab_size: PositiveInt = 1024
    hidden_size: PositiveInt = 128
    num_hidden_layers: PositiveInt = 4
    num_attention_heads: PositiveInt = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: Annotated[int, msgspec.Meta(ge=2, multiple_of=2)] = 32
    num_experts: Annotated[int, msgspec.Meta(ge=1, le=2**15)] = 8
    num_experts_per_tok: PositiveInt = 2
    moe_intermediate_size: PositiveInt = 128
    norm_topk_prob: bool = True
    """Whether the weights of a token's chosen experts are scaled to sum to one."""
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: PositiveInt = 2048
    """Longest sequence, in tokens, that the rotary table covers."""
    mtp_num_heads: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    """Multi-token-prediction heads, 0 or 1; used by mid-training only."""
    numerics: NumericsConfig = NumericsConfig()
    """How it is computed; no part of the checkpoint format."""

    def __post_init__(self) -> None:
        """Refuse shapes that no model can have."""
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
        _require(
            self.num_experts_per_tok <= self.num_experts,
            "num_experts_per_tok must be at most num_experts",
        )
        block = BLOCKS[self.numerics.expert_format]
        _require(
            self.hidden_size % block == 0 and self.moe_intermediate_size % block == 0,
            f"hidden_size and moe_intermediate_size must be multiples of {block} "
            f"for numerics.expert_format {self.numerics.expert_format}",
        )

    @property
    def query_dim(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_dim(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_key_value_heads * self.head_dim


def _require(condition: bool, expectation: str) -> None:
    if not condition:
        raise ConfigError(f"policy: {expectation}")
