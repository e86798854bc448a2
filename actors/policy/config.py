"""The policy's shape, in the field names of Qwen3-MoE's `config.json`, and its numerics.

Imports no torch. How exactly trainer and sampler compute alike:

    off     what a plain trainer does: experts routed again, scores in bfloat16
    fast    recorded routes replayed, scores in float32, sums in an order fixed by the batch
    exact   the sampler's own arithmetic: equal logprobs, to the bit (`exact.py`)

docs/numerics.md has the price of each, and what it removes.
"""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.settings import PositiveFloat, PositiveInt, one_of

MODES = ("off", "fast", "exact")
EXPERT_FORMATS = ("bf16", "mxfp8", "nvfp4")
_BLOCKS = {"bf16": 1, "mxfp8": 32, "nvfp4": 16}
"""Elements of a matmul's summed dimension that share a scale."""


class ExactModeError(PenstockError, RuntimeError):
    """Exact mode was asked for where the sampler's arithmetic is not available."""


class ForeignArithmeticError(PenstockError, ValueError):
    """Tokens were sampled in an arithmetic that this trainer does not compute in."""


class NumericsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Remedies against mismatch between trainer and sampler."""

    mode: Annotated[str, one_of(MODES)] = "fast"
    plausible: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """A replayed expert whose probability here is lower gives way to the router's own best; 0 keeps
    them all (Composer 2, arXiv 2603.24477)."""

    expert_format: Annotated[str, one_of(EXPERT_FORMATS)] = "bf16"
    """Format of the operands of the experts' matmuls, for training and sampling alike; bf16 rounds
    the published weights and nothing else. mxfp8 and nvfp4 are emulated exactly (`experts.py`)."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.is_exact and self.expert_format == "nvfp4":
            raise ConfigError(
                "policy.numerics.expert_format: expected bf16 or mxfp8 in exact mode, got 'nvfp4', "
                "which the compiled step does not compute"
            )

    def check_sampler(self, arithmetic: str) -> None:
        """Refuse tokens of another arithmetic; what does not say its own is taken.

        Args:
            arithmetic: the sampler's step and format, e.g. `native/mxfp8`, or empty.

        Raises:
            ForeignArithmeticError: Other experts' format, or in exact mode another step.

        """
        if not arithmetic:
            return
        step, _, expert_format = arithmetic.partition("/")
        if expert_format != self.expert_format:
            raise ForeignArithmeticError(
                f"sampled with {expert_format} experts, trained with {self.expert_format}: set "
                "policy.numerics.expert_format to the same on both sides"
            )
        if self.is_exact and step != "native":
            raise ForeignArithmeticError(
                f"sampled with the {step} step, and policy.numerics.mode is exact: expected native"
            )

    @property
    def replays(self) -> bool:
        """Whether recorded routes are used."""
        return self.mode != "off"

    @property
    def has_exact_gate(self) -> bool:
        """Whether the experts' scores are computed in float32."""
        return self.mode != "off"

    @property
    def is_exact(self) -> bool:
        """Whether the trainer computes with the sampler's own arithmetic."""
        return self.mode == "exact"


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
        block = _BLOCKS[self.numerics.expert_format]
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
