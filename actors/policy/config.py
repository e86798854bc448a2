"""The policy's shape, in the field names of Qwen3-MoE's `config.json`. Imports no torch."""

import msgspec

from penstock.actors.policy.numerics import BLOCKS, NumericsConfig


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the mixture-of-experts transformer; the defaults make 1.9M parameters."""

    vocab_size: int = 1024
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    moe_intermediate_size: int = 128
    norm_topk_prob: bool = True
    """Whether the weights of a token's chosen experts are scaled to sum to one."""
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 2048
    """Longest sequence, in tokens, that the rotary table covers."""
    mtp_num_heads: int = 1
    """Multi-token-prediction heads, 0 or 1; used by mid-training only."""
    numerics: NumericsConfig = NumericsConfig()
    """How it is computed; no part of the checkpoint format."""

    def __post_init__(self) -> None:
        """Refuse shapes that no model can have."""
        for name in self.__struct_fields__:
            if name not in ("mtp_num_heads", "numerics") and getattr(self, name) is not False:
                _require(getattr(self, name) > 0, f"{name} must be positive")
        _require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_attention_heads must be a multiple of num_key_value_heads",
        )
        _require(self.head_dim % 2 == 0, "head_dim must be even (rotary pairs)")
        _require(
            self.num_experts_per_tok <= self.num_experts <= 2**15,
            "num_experts must lie in num_experts_per_tok..32768",
        )
        _require(self.mtp_num_heads in (0, 1), "mtp_num_heads must be 0 or 1")
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
        raise ValueError(f"PolicyConfig: {expectation}")
