"""How exactly trainer and sampler compute alike. Imports no torch.

    off     what a plain trainer does: experts routed again, scores in bfloat16
    fast    recorded routes replayed, scores in float32, sums in an order fixed by the batch
    exact   the sampler's own arithmetic: equal logprobs, to the bit (`exact.py`)

docs/numerics.md has the price of each, and what it removes.
"""

from typing import Annotated

import msgspec

from penstock.messages.errors import ConfigError, PenstockError
from penstock.messages.settings import one_of

MODES = ("off", "fast", "exact")
EXPERT_FORMATS = ("bf16", "mxfp8", "nvfp4")
BLOCKS = {"bf16": 1, "mxfp8": 32, "nvfp4": 16}
"""How many elements of a matmul's summed dimension share a scale."""


class ExactModeError(PenstockError, RuntimeError):
    """Exact mode was asked for where the sampler's arithmetic is not available."""


class ForeignArithmeticError(PenstockError, ValueError):
    """Tokens were sampled in an arithmetic that this trainer does not compute in."""


class NumericsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The remedies against mismatch."""

    mode: Annotated[str, one_of(MODES)] = "fast"
    plausible: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.0
    """A replayed expert whose probability here is lower gives way to the router's own best; 0 keeps
    them all (Composer 2, arXiv 2603.24477)."""

    expert_format: Annotated[str, one_of(EXPERT_FORMATS)] = "bf16"
    """Of the operands of the experts' matmuls, in training and in sampling alike; bf16 rounds the
    published weights and nothing else. mxfp8 and nvfp4 are emulated exactly (`precision.py`)."""

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
