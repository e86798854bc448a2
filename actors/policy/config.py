"""The policy's shape, in the field names of Qwen3's `config.json`, and its numerics.

Imports no torch. How exactly trainer and sampler compute alike:

    off     what a plain trainer does: experts routed again, scores in bfloat16
    fast    recorded routes replayed, scores in float32, sums in an order fixed by the batch
    exact   the sampler's own arithmetic: equal logprobs, to the bit (`exact.py`)

docs/numerics.md has the price of each, and what it removes.
"""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt, one_of

MODES = ("off", "fast", "exact")
EXPERT_FORMATS = ("bf16", "mxfp8", "nvfp4")
DEVICES = ("cpu", "cuda")
KERNEL_BOUNDS = {"num_experts": 1024, "num_experts_per_tok": 32, "vocab_size": 2**19}
"""Largest sizes that the CUDA kernels compute."""
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
    """A replayed expert gives way to the router's own best where its probability is below this
    share of the weakest of the experts that the router itself would choose; 0 keeps them all
    (Composer 2, arXiv 2603.24477)."""

    expert_format: Annotated[str, one_of(EXPERT_FORMATS)] = "bf16"
    """Format of the operands of the experts' matmuls, or of a dense model's layers, for
    training and sampling alike; bf16 rounds the published weights and nothing else. mxfp8 and nvfp4
    are emulated exactly (`experts.py`)."""

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


_Width = Annotated[int, msgspec.Meta(ge=1, le=2**20)]
"""Far beyond any model: what a folder claims is bounded before anything is allocated."""


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the transformer, sparse or dense; the defaults make 1.9M parameters."""

    architecture: str = ""
    """Model type of a Hugging Face folder that transformers and vLLM compute, and nothing here;
    empty for Qwen3-MoE and Qwen3."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**22)] = 1024
    hidden_size: _Width = 128
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=2**10)] = 4
    num_attention_heads: Annotated[int, msgspec.Meta(ge=1, le=2**12)] = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: Annotated[int, msgspec.Meta(ge=2, le=2**12, multiple_of=2)] = 32
    num_experts: Annotated[int, msgspec.Meta(ge=0, le=2**15)] = 8
    """Experts of each layer; 0 is a dense model, Qwen3's architecture, which has no routes."""
    num_experts_per_tok: NonNegativeInt = 2
    """Experts that a token goes through; 0 in a dense model."""
    moe_intermediate_size: _Width = 128
    """Width of one expert; without effect in a dense model."""
    intermediate_size: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """Width of a dense model's feed-forward layers; 0 with experts."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's chosen experts are scaled to sum to one."""
    rope_theta: PositiveFloat = 10_000.0
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1, le=2**21)] = 2048
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
        if self.is_dense:
            _require(
                self.num_experts_per_tok == 0 and self.intermediate_size > 0,
                "without experts (num_experts 0), num_experts_per_tok must be 0 and "
                "intermediate_size at least 1",
            )
        else:
            _require(
                1 <= self.num_experts_per_tok <= self.num_experts,
                "num_experts_per_tok must be at least 1 and at most num_experts",
            )
            _require(self.intermediate_size == 0, "intermediate_size must be 0 with experts")
            _require(
                self.num_experts * self.num_hidden_layers <= 2**17,
                f"num_experts times num_hidden_layers must be at most {2**17}",
            )
        block = _BLOCKS[self.numerics.expert_format]
        name = "intermediate_size" if self.is_dense else "moe_intermediate_size"
        _require(
            self.hidden_size % block == 0 and self.ffn_width % block == 0,
            f"hidden_size and {name} must be multiples of {block} "
            f"for numerics.expert_format {self.numerics.expert_format}",
        )

    def check_device(self, device: str, setting: str) -> None:
        """Refuse a device that cannot compute this policy.

        Args:
            device: one of `DEVICES`.
            setting: that names it, for the error.

        Raises:
            ConfigError: It cannot; the text says which setting of the policy is against it.

        """
        if device == "cpu":
            return
        on_device = f"with {setting} = {device!r}"
        if self.numerics.is_exact:
            expected = f"expected 'fast' or 'off' {on_device}, got 'exact', the CPU's compiled step"
            raise ConfigError(f"policy.numerics.mode: {expected}")
        if self.numerics.expert_format == "nvfp4":
            expected = f"expected 'bf16' or 'mxfp8' {on_device}, got 'nvfp4', which has no kernel"
            raise ConfigError(f"policy.numerics.expert_format: {expected}")
        for name, bound in KERNEL_BOUNDS.items():
            if (value := getattr(self, name)) > bound:
                raise ConfigError(
                    f"policy.{name}: expected at most {bound} {on_device}, got {value}"
                )

    @property
    def is_foreign(self) -> bool:
        """Whether neither the own policy nor the native generator computes it."""
        return bool(self.architecture)

    @property
    def is_dense(self) -> bool:
        """Whether every token goes through the same feed-forward layer: no experts, no routes."""
        return self.num_experts == 0

    @property
    def ffn_width(self) -> int:
        """Intermediate size of an expert, or of a dense model's feed-forward layer."""
        return self.intermediate_size if self.is_dense else self.moe_intermediate_size

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
