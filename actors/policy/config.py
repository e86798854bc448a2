"""Shape of the policy, with the field names of `config.json`, and its numerics.

Must not import torch. `numerics.mode` sets how closely the trainer matches the sampler:

    off     like a plain trainer: experts are routed again, scores in bfloat16
    fast    recorded routes are replayed, scores in float32, sums in an order fixed by the batch
    exact   the sampler's own arithmetic: equal logprobs, to the bit (`exact.py`)

See docs/numerics.md for the cost of each mode and the mismatch that it removes.
"""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.settings import NonNegativeInt, PositiveFloat, PositiveInt, one_of

MODES = ("off", "fast", "exact")
EXPERT_FORMATS = ("bf16", "mxfp8", "nvfp4")
DEVICES = ("cpu", "cuda")
_BLOCKS = {"bf16": 1, "mxfp8": 32, "nvfp4": 16}
"""Number of elements that share a scale, along the summed dimension of a matmul."""


class ExactModeError(PenstockError, RuntimeError):
    """Exact mode was requested where the sampler's arithmetic is not available."""


class ForeignArithmeticError(PenstockError, ValueError):
    """Tokens were sampled with an arithmetic that this trainer does not use."""


class NumericsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that reduce the mismatch between trainer and sampler."""

    mode: Annotated[str, one_of(MODES)] = "fast"
    """How closely the trainer matches the sampler: off, fast or exact."""
    plausible: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """Threshold below which a replayed expert is replaced by the router's own best one, as a
    fraction of the probability of the weakest expert that the router would choose; 0 keeps all
    replayed experts (Composer 2, arXiv 2603.24477)."""

    expert_format: Annotated[str, one_of(EXPERT_FORMATS)] = "bf16"
    """Number format of the operands of the experts' matmuls (or of a dense model's feed-forward
    layers) in training and sampling. bf16 only rounds the published weights; mxfp8 and nvfp4 are
    emulated exactly (`experts.py`)."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.is_exact and self.expert_format == "nvfp4":
            raise ConfigError(
                "policy.numerics.expert_format: expected bf16 or mxfp8 in exact mode, got 'nvfp4', "
                "which the compiled step does not compute"
            )

    def check_sampler(self, arithmetic: str) -> None:
        """Check that the trainer can train on tokens that were sampled with this arithmetic.

        Args:
            arithmetic: Step and expert format of the sampler, e.g. `native/mxfp8`, or empty.

        Raises:
            ForeignArithmeticError: The expert format differs or, in exact mode, the step.

        """
        # A sampler that does not report its arithmetic is accepted.
        if not arithmetic:
            return
        step, _, expert_format = arithmetic.partition("/")
        if expert_format != self.expert_format:
            raise ForeignArithmeticError(
                f"tokens were sampled with {expert_format} experts, but this trainer uses "
                f"{self.expert_format}: set the same policy.numerics.expert_format for both"
            )
        if self.is_exact and step != "native":
            raise ForeignArithmeticError(
                f"tokens were sampled with the {step} step, but policy.numerics.mode exact expects "
                "native"
            )

    @property
    def replays(self) -> bool:
        """Whether recorded routes are replayed."""
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
"""Integer with an upper bound far above any real model, so that a malicious folder cannot cause a
huge allocation."""


class RopeScaling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Slower rotation of slow frequencies, as Llama 3.1 does it; a factor of 1 scales nothing."""

    factor: Annotated[float, msgspec.Meta(ge=1, le=2**16)] = 1.0
    """Factor of the slow frequencies' wavelengths."""
    low_freq_factor: PositiveFloat = 1.0
    """Number of rotations within the original context below which a frequency is slow."""
    high_freq_factor: PositiveFloat = 4.0
    """Number of rotations within the original context above which a frequency is left alone."""
    original_max_position_embeddings: Annotated[int, msgspec.Meta(ge=1, le=2**21)] = 8192
    """Context before the scaling, in tokens."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        if self.low_freq_factor >= self.high_freq_factor:
            text = "expected a value above low_freq_factor"
            raise ConfigError(f"policy.rope_scaling.high_freq_factor: {text}")


ADAPTER_TARGETS = (
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj"),
)
"""Matrices that the built-in policy adapts; those of its feed-forward layers only if it is
dense."""
_Target = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_]{1,64}\Z")]


class AdapterConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """LoRA (arXiv 2106.09685): beside each target W, alpha / rank * B A trains, and W does not."""

    rank: Annotated[int, msgspec.Meta(ge=1, le=2**14)] = 16
    """Rows of A and columns of B."""
    alpha: PositiveFloat = 32.0
    """The product counts alpha / rank."""
    targets: Annotated[tuple[_Target, ...], msgspec.Meta(min_length=1, max_length=64)] = (
        ADAPTER_TARGETS
    )
    """Last names of the modules that are adapted, in every layer."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
        for name in self.targets:
            if self.targets.count(name) > 1:
                text = f"expected each name once, got {name!r} twice"
                raise ConfigError(f"trainer.adapter.targets: {text}")

    @property
    def scale(self) -> float:
        """Factor of the product B A."""
        return self.alpha / self.rank


FAMILIES = ("qwen3", "llama", "mistral", "qwen2")


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of the transformer, sparse or dense; the defaults give 1.9M parameters."""

    architecture: str = ""
    """Model type of a Hugging Face folder that only transformers and vLLM can compute; empty for
    those that the built-in policy computes."""
    family: Annotated[str, one_of(FAMILIES)] = "qwen3"
    """Variant of the block: qwen3 normalizes queries and keys, llama and mistral do not, and qwen2
    adds biases to queries, keys and values instead."""
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=2**22)] = 1024
    hidden_size: _Width = 128
    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=2**10)] = 4
    num_attention_heads: Annotated[int, msgspec.Meta(ge=1, le=2**12)] = 4
    num_key_value_heads: PositiveInt = 2
    head_dim: Annotated[int, msgspec.Meta(ge=2, le=2**12, multiple_of=2)] = 32
    num_experts: Annotated[int, msgspec.Meta(ge=0, le=2**15)] = 8
    """Number of experts per layer; 0 for a dense model, which has no routes."""
    num_experts_per_tok: NonNegativeInt = 2
    """Number of experts per token; 0 in a dense model."""
    moe_intermediate_size: _Width = 128
    """Width of one expert; ignored in a dense model."""
    intermediate_size: Annotated[int, msgspec.Meta(ge=0, le=2**20)] = 0
    """Width of a dense model's feed-forward layers; 0 in a model with experts."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's chosen experts are scaled to sum to one."""
    rope_theta: PositiveFloat = 10_000.0
    rope_scaling: RopeScaling = RopeScaling()
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = True
    max_position_embeddings: Annotated[int, msgspec.Meta(ge=1, le=2**21)] = 2048
    """Longest sequence in tokens that the rotary table covers."""
    mtp_num_heads: Annotated[int, msgspec.Meta(ge=0, le=1)] = 1
    """Number of multi-token-prediction heads, 0 or 1; only mid-training uses them."""
    adapter: AdapterConfig | None = None
    """The run's `trainer.adapter`, which is set there alone; not part of the checkpoint format."""
    numerics: NumericsConfig = NumericsConfig()
    """Numerics of the policy; not part of the checkpoint format."""

    def __post_init__(self) -> None:
        """Check fields against each other."""
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
                # Bounds the number of tensors that a model folder can claim.
                self.num_experts * self.num_hidden_layers <= 2**17,
                f"num_experts times num_hidden_layers must be at most {2**17}",
            )
        _require(
            self.is_dense or self.family == "qwen3",
            f"num_experts must be 0 with family {self.family!r}, which has no experts here",
        )
        # A row must consist of whole blocks, each with one scale.
        block = _BLOCKS[self.numerics.expert_format]
        name = "intermediate_size" if self.is_dense else "moe_intermediate_size"
        _require(
            self.hidden_size % block == 0 and self.ffn_width % block == 0,
            f"hidden_size and {name} must be multiples of {block} "
            f"for numerics.expert_format {self.numerics.expert_format}",
        )

    @property
    def is_foreign(self) -> bool:
        """Whether only transformers and vLLM can compute it, not the built-in policy or engine."""
        return bool(self.architecture)

    @property
    def is_dense(self) -> bool:
        """Whether the model has no experts and therefore no routes."""
        return self.num_experts == 0

    @property
    def has_qk_norm(self) -> bool:
        """Whether queries and keys are normalized per head."""
        return self.family == "qwen3"

    @property
    def has_qkv_bias(self) -> bool:
        """Whether queries, keys and values have biases."""
        return self.family == "qwen2"

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
