"""LoRA beside the built-in policy's matrices, and what it shares with other implementations.

Names are those of PEFT's files, so that versions, folders and vLLM mean the same tensors.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional as F

from penstock.actors.policy.config import AdapterConfig

PREFIX = "base_model.model."
"""Prefix of a module's name in PEFT's files."""
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FOLDERS = {".attention.adapters.": ".self_attn.", ".experts.adapters.": ".mlp."}
_ELEMENTS_MAX = 1 << 16
"""Elements of one block of rows in `merge`, which stay in the processor's cache."""


def is_adapter(parameter: str) -> bool:
    """Return whether a parameter of the built-in policy is an adapter's."""
    return ".adapters." in parameter


def tensor_name(parameter: str) -> str:
    """Return the name of an adapter's A or B from its parameter's in the built-in policy."""
    module, _, factor = parameter.rpartition(".")
    for own, theirs in _FOLDERS.items():
        module = module.replace(own, theirs)
    return tensor_names(f"model.{module}")["ab".index(factor)]


def tensor_names(module: str) -> tuple[str, str]:
    """Return the names of A and B of an adapted module."""
    return f"{PREFIX}{module}{_A}", f"{PREFIX}{module}{_B}"


def module_of(tensor: str) -> str:
    """Return the module whose adapter's A or B has this name in a version."""
    return tensor.removeprefix(PREFIX).removesuffix(_A).removesuffix(_B)


def initial_adapters(
    shapes: Mapping[str, tuple[int, ...]], seed: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the first values of every A and B, float32, in the order of their names.

    A is uniform up to 1 / sqrt(columns), as in PEFT, and B is 0.

    Args:
        shapes: By the names of a version.
        seed: Of the run.

    """
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(shapes):
        value = torch.zeros(shapes[name], device="cpu")
        if name.endswith(_A):
            bound = 1.0 / math.sqrt(shapes[name][1])
            value.uniform_(-bound, bound, generator=generator)
        yield name, value


class LowRank(nn.Module):
    """The adapter of one matrix: scale * B A."""

    def __init__(self, config: AdapterConfig, num_out: int, num_in: int) -> None:
        """Begin without values.

        Args:
            config: Of all adapters.
            num_out: Rows of the matrix.
            num_in: Columns of the matrix.

        """
        super().__init__()
        self.scale = config.scale
        self.a = nn.Parameter(torch.empty(config.rank, num_in))
        self.b = nn.Parameter(torch.empty(num_out, config.rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the adapter adds to the matrix's product: [T, n] -> [T, m]."""
        return F.linear(F.linear(x, self.a), self.b) * self.scale


def adapters_of(
    config: AdapterConfig | None, shapes: Mapping[str, tuple[int, int]]
) -> nn.ModuleDict:
    """Return, by name, the adapters of those of the given matrices [m, n] that are targets."""
    found = nn.ModuleDict()
    for name, shape in shapes.items():
        if config is not None and name in config.targets:
            found[name] = LowRank(config, *shape)
    return found


@torch.no_grad()
def merge(tensors: Mapping[str, torch.Tensor], scale: float) -> None:
    """Add every adapter's product to its matrix, in place: W + scale * B A.

    The sum has one order on every machine and at any number of threads, so that trainer and
    engines merge to the same bits.

    Args:
        tensors: By the names of a version: matrices [m, n], float32; A [r, n]; B [m, r].
        scale: `AdapterConfig.scale`.

    """
    for name, a in tensors.items():
        if not name.startswith(PREFIX) or not name.endswith(_A):
            continue
        module = module_of(name)
        weight, b = tensors[f"{module}.weight"], tensors[tensor_names(module)[1]].float()
        factor = a.float()
        rows = max(1, _ELEMENTS_MAX // weight.shape[1])
        for part, left in zip(weight.split(rows), b.split(rows), strict=True):
            total = torch.zeros_like(part)
            for index in range(factor.shape[0]):
                total.add_(left[:, index : index + 1] * factor[index])
            part.add_(total.mul_(scale))
