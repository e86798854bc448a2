"""What all implementations of LoRA have in common: names, initial values, the merged matrix.

Names are those of PEFT's files, so that versions, folders and vLLM mean the same tensors.
"""

import math
from collections.abc import Iterator, Mapping

import torch

PREFIX = "base_model.model."
"""Before the name of a module in PEFT's files."""
_ELEMENTS_MAX = 1 << 16
"""Elements of one block of rows in `merged`, which stay in the processor's cache."""


def tensor_names(module: str) -> tuple[str, str]:
    """Return the names of A and B of an adapted module."""
    return f"{PREFIX}{module}.lora_A.weight", f"{PREFIX}{module}.lora_B.weight"


def initial_a(shapes: Mapping[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the initial A of each module, in order of their names; B begins at 0.

    Values are uniform up to 1 / sqrt(columns), as in PEFT.

    Args:
        shapes: [r, n] of A, by any name that sorts alike on all processes.
        seed: Of the run.

    """
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(shapes):
        bound = 1.0 / math.sqrt(shapes[name][1])
        yield name, torch.empty(shapes[name]).uniform_(-bound, bound, generator=generator)


def merged(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return W + scale * B A, float32 [m, n]; a copy.

    The sum has one order on every machine and at any number of threads, so that trainer and
    engines merge to the same bits.

    Args:
        weight: W, float32 [m, n].
        a: [r, n].
        b: [m, r].
        scale: `AdapterConfig.scale`.

    """
    found = weight.detach().clone()
    rows = max(1, _ELEMENTS_MAX // weight.shape[1])
    for part, left in zip(found.split(rows), b.detach().split(rows), strict=True):
        total = torch.zeros_like(part)
        for index in range(a.shape[0]):
            total.add_(left[:, index : index + 1] * a[index])
        part.add_(total.mul_(scale))
    return found
